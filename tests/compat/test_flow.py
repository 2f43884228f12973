"""Which commands of a launch script run, and with which values."""

from pathlib import Path

import pytest

from tether.compat.launch import launches, options, overrides
from tether.errors import ConfigError


def words(script, source="sub/launch.sh"):
    """The arguments of ``python t.py`` in the order in which they are considered."""
    return [" ".join(each.words) for each in launches(script, source) if each.program == "python t.py"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('M=b\ncase "$M" in\n  a) X=1 ;;\n  b|c) X=2;;\n  *) X=3 ;;\nesac\npython t.py --x $X', ["--x 2"]),
        ("M=z\ncase $M in a) X=1;; *)\n X=3\n Y=4\n;; esac\npython t.py --x $X --y $Y", ["--x 3 --y 4"]),
        ('M=Qwen2.5-7B\ncase "$M" in *Llama*) X=1;; (Qwen*) X=2;; esac; python t.py --x $X', ["--x 2"]),
        ('M=b\ncase ${M} in "a b") X=1;; [bc]) X=2;; esac\npython t.py --x $X', ["--x 2"]),
        ("M=q\nX=0\ncase $M in a) X=1;; esac\npython t.py --x $X", ["--x 0"]),
        ("M=a\ncase $M in a) if true; then X=5; fi;; *) X=6;; esac\npython t.py --x $X", ["--x 5"]),
        ('N=8\nif [ "$N" -gt 4 ]; then\n  X=big\nelse\n  X=small\nfi\npython t.py --x $X', ["--x big"]),
        ("N=2\nif [ $N -gt 4 ]; then X=a; elif [[ $N == 2 ]]; then X=b; else X=c; fi\npython t.py --x $X", ["--x b"]),
        ('A=m\nif [[ -n "$A" && $A != *x* ]]; then X=1; else X=2; fi\npython t.py --x $X', ["--x 1"]),
        ("if [[ -z ${DEBUG} || $DEBUG == 0 ]]; then X=1; fi\npython t.py --x $X", ["--x 1"]),
        ('if [ -z "$1" ]; then M=org/m; else M=$1; fi\npython t.py --m $M', ["--m org/m"]),
        ("if [ $# -lt 2 ]; then N=1; fi\npython t.py --n $N", ["--n 1"]),
        ("if ! [ 1 = 2 ]; then X=1; fi\npython t.py --x $X", ["--x 1"]),
        ('X=1\n[ "$X" = 1 ] && Y=2 || Y=3\npython t.py --y $Y', ["--y 2"]),
        ('X=0\n[ "$X" = 1 ] && Y=2 || Y=3\npython t.py --y $Y', ["--y 3"]),
        ('[[ -n "$WANDB" ]] && ARGS+=(--wandb "$WANDB")\npython t.py --a 1 "${ARGS[@]}"', ["--a 1"]),
        ("mkdir -p out || { echo no; X=1; exit 1; }\ncd out && Y=2\npython t.py --y $Y --x $X", ["--y 2 --x $X"]),
        ("for SEED in 3 4 5; do\n python t.py --seed $SEED\ndone", ["--seed 3"]),
        ("L=(p q)\nfor E in \"${L[@]}\"; do for N in 1 2\ndo python t.py --e $E --n $N; done; done", ["--e p --n 1"]),
        ('while [[ $# -gt 0 ]]; do case "$1" in --lr) LR="$2"; shift 2;; *) exit 1;; esac; done\n'
         "python t.py --lr ${LR:-3}", ["--lr 3"]),
        ("train() {\n  local m=$1; shift\n  python t.py --m $m \"$@\"\n}\ntrain org/a --b 1", ["--m org/a --b 1"]),
        ("function go {\n python t.py --m $1\n}\nM=x\ngo $M\ngo y", ["--m x", "--m y"]),
        ('main ()\n{\n python t.py --a ${2:-7} "$@"\n}\nmain "$@"', ["--a 7"]),
        ("f() {\n f; f; g() { f; }\n g; python t.py --a 1\n}\nf", ["--a 1"]),
        ('A=(p "q r")\nN=1\npython t.py --a "${A[1]}" --b ${A[$N]} --c "${A[0]}-${#A[@]}" --d "${A[*]}"',
         ["--a q r --b q r --c p-2 --d p q r"]),
        ('declare -A M=( ["qwen"]="org/q" [llama]=org/l )\nK=llama\npython t.py --a ${M[$K]} --b "${M[qwen]}"',
         ["--a org/l --b org/q"]),
        ('A=(x)\nB="${A[0]}y"\npython t.py --a $B --b ${A[7]} --c ${C[1]}', ["--a xy --b ${A[7]} --c ${C[1]}"]),
        ('set -- --b 1 "$@"\npython t.py --a 1 "$@" ${@:2}', ["--a 1 --b 1 1"]),
        ("if false; then\n cat > f <<EOF\na: 1\nEOF\nfi\nf() { python t.py ${@:2}; }\nf no --a 1", ["--a 1"]),
        ("for A in {2..4}; do for B in $(seq 5); do for C in $(seq 3 2 9)\ndo python t.py --x $A $B $C; done\n"
         "done; done",
         ["--x 2 1 3"]),
        ("A=()\nif [ ${#A[@]} -gt 0 ] || [ ${#B[@]} -gt 0 ]; then X=1; else X=2; fi\npython t.py --x $X", ["--x 2"]),
        ('if [ "$X" = 1 ] && python -c "import a"; then Y=1; else Y=2; fi\npython t.py --y $Y', ["--y 2"]),
        ("N=4\nif (( N > 1 && N != 3 )); then X=1; else X=2; fi\npython t.py --x $X", ["--x 1"]),
        ("D=0\nif (( D == 1 )); then\n printf '%q ' python t.py\nelse\n python t.py --x $D\nfi", ["--x 0"]),
        ("(( ${N:-8} >= 2 )) && X=1\n((!M)) && Y=2\npython t.py --x $X --y $Y", ["--x 1 --y 2"]),
        ("unused() { python t.py --a 1; }\npython t.py --a 2", ["--a 2", "--a 1"]),
        ("if [ 1 = 2 ]; then A=1; python t.py --a $A; fi\nA=${A:-3}\npython t.py --a $A", ["--a 3", "--a 1"]),
        ("set -x\nset -euo pipefail\nexport A=${A:-default} B=${B:=b}\npython t.py --a $A \\\n  # no\n  --b $B",
         ["--a default --b b"]),
        ("cat > x.txt <<EOF\nif [ 1 = 1 ]\n; then \"\nEOF\npython t.py --a 1", ["--a 1"]),
        ("time python t.py --a 1 && python t.py --a 2", ["--a 1", "--a 2"]),
        ("python t.py --a 1 | tee log; exit ${PIPESTATUS[0]}", ["--a 1"]),
        ("for ((i=0; i<3; i++)); do echo $i; done\npython t.py --a 1", ["--a 1"]),
        ("(\n  A=1\n  python t.py --a $A\n)", ["--a 1"]),
        ('bash -c "if true; then python t.py --a 1; fi"', ["--a 1"]),
        ('A=\'x "y z"\'\npython t.py --a "$A" --b "it\'s \\"b\\"" --c \'p="q"\'',
         ['--a x "y z" --b it\'s "b" --c p="q"']),
    ],
)  # fmt: skip
def test_the_branch_that_is_taken_counts(script, expected):
    assert words(script) == expected


def test_a_script_that_is_read_in_sets_variables(tmp_path):
    (tmp_path / "env.sh").write_text("export M=org/m\nN=${N:-2}\nsource other.sh\n")
    (tmp_path / "other.sh").write_text("O=3\nsource env.sh\n")
    for line in ('source "$(dirname "$0")/env.sh"', ". env.sh", "true && source ./env.sh"):
        assert words(f"{line}\npython t.py --m $M --o $O", str(tmp_path / "l.sh")) == ["--m org/m --o 3"]
    line = "[ -f env.sh ] && source env.sh"
    assert words(f"{line}\npython t.py --m $M --o $O", str(tmp_path / "l.sh")) == ["--m ${M?1} --o ${O?1}"]
    assert words("source none.sh\npython t.py --m $M") == ["--m $M"]


@pytest.mark.parametrize(
    "script",
    [
        "if [ -f x ]; then\n  LR=1\nelse\n  LR=2\nfi\npython t.py --lr $LR",
        "case $(hostname) in\n a) LR=1;;\n *) LR=2;;\nesac\npython t.py --lr $LR",
        "LR=3\n[ -d /data ] && LR=1\nX=$LR\npython t.py --lr $X",
        "for LR in $(cat rates); do\n python t.py --lr $LR\ndone",
        "if python -c 'import vllm'; then LR=1; fi\npython t.py --lr $LR",
        "((LR=2))\npython t.py --lr $LR", "for ((LR=1; LR<3; LR++)); do\n python t.py --lr $LR\ndone",
        "((LR++))\npython t.py --lr $LR",
        "while grep -q a b; do LR=1; done\npython t.py --lr $LR",
    ],
)
def test_what_only_a_shell_can_decide_is_unknown_and_names_its_line(script):
    (launch,) = (each for each in launches(script, "l.sh") if each.program == "python t.py")
    line = 2 if script.startswith("LR") else 1
    assert options(launch.words, "l.sh") == {"lr": f"${{{'LR'}?{line}}}"}


def test_a_command_in_a_branch_that_only_a_shell_can_decide_has_the_values_of_that_branch():
    script = "A=1\nif [ -f x ]; then A=2; python t.py --a $A; else python t.py --a $A; fi"
    assert words(script) == ["--a 2", "--a 1"]


@pytest.mark.parametrize("read", [options, overrides])
@pytest.mark.parametrize(
    "script",
    ["A=(--x 1)\n[ -f y ] && A+=(--lr 2)\npython t.py --a 1 \"${A[@]}\"",
     'A="--x 1"\n[ -f y ] && A="$A --lr 2"\npython t.py --a 1 $A',
     "A=(b=1)\nif [ -f y ]; then A+=(c=2); fi\npython t.py --a 1 ${A[@]}"],
)  # fmt: skip
def test_options_that_only_a_shell_knows_are_refused_with_their_line(script, read):
    (launch,) = (each for each in launches(script, "l.sh") if each.program == "python t.py")
    message = r"^l\.sh: line 2 holds a condition that only a shell knows, which decides what A holds: keep the branch"
    with pytest.raises(ConfigError, match=message):
        read(launch.words, "l.sh")


def test_overrides_that_a_command_prints_are_told():
    (launch,) = launches('python t.py a.b=1 $(if [ -n "$X" ]; then echo "a.c=$X"; fi) $EXTRA', "l.sh")
    with pytest.raises(ConfigError, match=r'^l\.sh: only a shell can run \$\(if \[ -n "\$X" \].*…: write what it'):
        overrides(launch.words, "l.sh")


def test_notes_tell_of_branches_and_rounds():
    script = "for S in 3 4; do\n python t.py --s $S\ndone\nif false; then\n python t.py --s 9\nfi\npython t.py --s 5"
    found = [each for each in launches(script, "l.sh") if each.program == "python t.py"]
    assert [each.notes for each in found] == [
        ("The run is that of the first round of the loop in line 1, with S 3.",), (),
        ("The run is in a branch that the script, as it stands, does not take (line 4).",),
    ]  # fmt: skip


def test_hydras_words():
    given = [
        "a.b=1", "+a.c=x", "++a.d=[a, b]", "~a.e", "~a.f=2", "+a.g={x: 1, y: {z: t}}", "a.h='p=q'", "a.i={}",
        "a.j=\"['u', 'v w']\"", "group@a.k=mine", "hydra/launcher=slurm", "a.l=", "a.m=null", "a.n='[1, 2]'", "$EXTRA",
        "a.o=$X", "a.r=${A[1]}", "a.p=1e-6", "a.q=it's",
        "a.b-c=1", "--a.d=1", "x",
    ]  # fmt: skip
    assert overrides(given, "l.sh") == {
        "a.b": 1, "a.c": "x", "a.d": ["a", "b"], "~a.e": "removed", "~a.f": 2, "a.g.x": 1, "a.g.y.z": "t", "a.h": "p=q",
        "a.i": {}, "a.j": "['u', 'v w']", "group@a.k": "mine", "hydra/launcher": "slurm", "a.l": None, "a.m": None,
        "a.n": "[1, 2]", "a.o": "$X", "a.r": "${A[1]}", "a.p": 1e-6, "a.q": "it's", "a.b-c": 1,
    }  # fmt: skip


def test_a_program_is_found_behind_its_wrappers():
    module = "openrlhf.cli.train_ppo_ray"
    wrappers = ("ray job submit --address=http://a -- python3 -m", "deepspeed --module", "torchrun -m", "python -m")
    for wrapper in wrappers:
        (launch,) = launches(f"if true; then\n  {wrapper} {module} --a 1\nfi", str(Path("l.sh")))
        assert (launch.program, launch.words, launch.line) == (f"{wrapper} {module}", ["--a", "1"], 2)
