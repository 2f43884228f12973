"""The list of defects keeps up with the source and the tests. Planting them is for ``make mutants``."""

import ast
import json
from collections import Counter
from functools import cache

from tests.mutants.defects import DEFECTS, ROOT, SOURCE
from tests.mutants.run import KILLERS

COVERED = ("algo/", "models/forward.py", "data/collate.py", "train/trainer.py", "train/update.py")


@cache
def source(file):
    return (SOURCE / file).read_text(encoding="utf-8")


@cache
def functions(path):
    """Names of a test file's functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_defect_can_be_planted():
    for defect in DEFECTS:
        count = source(defect.file).count(defect.old)
        assert count == 1, f"{defect.file}: {defect.name}: {count} places hold {defect.old!r}, wanted one"
        planted = defect.planted(source(defect.file))
        assert planted != source(defect.file), defect.name
        ast.parse(planted)


def test_every_test_that_should_notice_exists(request):
    ids = {item.nodeid for item in request.session.items}
    complete = {item.nodeid.partition("::")[0] for item in request.session.items} if is_whole(request) else set()
    for defect in DEFECTS:
        assert defect.tests, defect.name
        for test in defect.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"{defect.name}: there is no {path}"
            assert not name or name.partition("[")[0] in functions(path), f"{defect.name}: there is no {test}"
            assert "[" not in name or path not in complete or test in ids, f"{defect.name}: there is no {test}"


def test_every_defect_was_killed_and_by_a_test_that_is_still_there(request):
    """Where this fails: ``python -m tests.mutants.run --record``, with ``--only`` and the words of one defect."""
    killers = json.loads(KILLERS.read_text(encoding="utf-8"))
    assert list(killers) == [defect.name for defect in DEFECTS]
    ids = {item.nodeid for item in request.session.items}
    complete = {test.partition("::")[0] for test in ids} if is_whole(request) else set()
    for defect in DEFECTS:
        test = killers[defect.name]
        path, _, name = test.partition("::")
        assert any(test.startswith(own) for own in defect.tests), f"{defect.name}: {test} is none of its tests"
        assert name.partition("[")[0] in functions(path), f"{defect.name}: there is no {test}"
        assert path not in complete or test in ids, f"{defect.name}: there is no {test}"


def is_whole(request):
    """Whether this session has every test of its files: parameters can be looked up then."""
    config = request.config
    return not (config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args))


def test_there_are_many_defects_and_each_has_a_name_of_its_own():
    assert [name for name, count in Counter(defect.name for defect in DEFECTS).items() if count > 1] == []
    edits = Counter((defect.file, defect.old, defect.new) for defect in DEFECTS)
    assert [edit for edit, count in edits.items() if count > 1] == []
    per_part = {part: sum(defect.file.startswith(part) for defect in DEFECTS) for part in COVERED}
    assert sum(per_part.values()) >= 60 and min(per_part.values()) >= 5, per_part
