"""Who made the processor, and what it multiplies fast."""

import pytest
import torch

from tether.models import device
from tether.models.device import half_is_slow, is_intel


@pytest.mark.parametrize("told", ["vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"])
@pytest.mark.parametrize("has_file", [True, False])
def test_the_system_says_it(tmp_path, monkeypatch, told, has_file):
    file = tmp_path / "cpuinfo"
    if has_file:
        file.write_text(told, encoding="utf-8")
    monkeypatch.setattr(device, "INFORMATION", file)
    monkeypatch.setattr(device.platform, "processor", lambda: "x86" if has_file else told)
    assert is_intel.__wrapped__() == ("Intel" in told)


@pytest.mark.parametrize(
    ("abilities", "intel", "slow"),
    [
        ({"amx_bf16", "amx_fp16"}, True, set()),
        ({"amx_bf16", "avx512_fp16"}, True, set()),
        ({"avx512_bf16", "avx512_fp16"}, True, {torch.bfloat16}),
        ({"avx512_bf16"}, False, {torch.float16}),
        ({"avx2"}, False, {torch.bfloat16, torch.float16}),
    ],
)
@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_half_precision_is_slow_without_units_for_it(monkeypatch, abilities, intel, slow, architecture):
    able = dict.fromkeys(abilities, True) | {"architecture": architecture}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.setattr(device, "is_intel", lambda: intel)
    seen = {dtype for dtype in (torch.bfloat16, torch.float16) if half_is_slow.__wrapped__(dtype)}
    assert seen == (slow if architecture == "x86_64" else set())
