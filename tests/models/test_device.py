"""Who made the processor."""

import pytest

from tether.models import device
from tether.models.device import is_intel


@pytest.mark.parametrize("told", ["vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"])
@pytest.mark.parametrize("has_file", [True, False])
def test_the_system_says_it(tmp_path, monkeypatch, told, has_file):
    file = tmp_path / "cpuinfo"
    if has_file:
        file.write_text(told, encoding="utf-8")
    monkeypatch.setattr(device, "INFORMATION", file)
    monkeypatch.setattr(device.platform, "processor", lambda: "x86" if has_file else told)
    assert is_intel.__wrapped__() == ("Intel" in told)
