"""Who made the processor."""

import pytest

from tether.models import processor
from tether.models.processor import is_intel


@pytest.mark.parametrize("told", ["vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"])
@pytest.mark.parametrize("has_file", [True, False])
def test_the_system_says_it(tmp_path, monkeypatch, told, has_file):
    file = tmp_path / "cpuinfo"
    if has_file:
        file.write_text(told, encoding="utf-8")
    monkeypatch.setattr(processor, "INFORMATION", file)
    monkeypatch.setattr(processor.platform, "processor", lambda: "x86" if has_file else told)
    assert is_intel.__wrapped__() == ("Intel" in told)
