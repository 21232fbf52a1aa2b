"""The GPUs that the PCI bus shows."""

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.subjects.gpus import facts as pci_bus
from nodeready.subjects.gpus.gpu import DeviceFile, PciGpu
from tests.builders.gpus import ADDRESSES, BUS, SERVER, SWITCHES, h100, pci, switch
from tests.builders.sections import run_on


def test_what_the_bus_shows():
    gone = pci("0000:1b:00.0", width=63).replace("numa_node:0", "numa_node:-1")
    (gpu,) = pci_bus.parse_pci(gone).pci
    assert (gpu.pcie_width, gpu.numa_node) == (None, None)
    observed = h100().observed()
    assert observed.pci[0] == PciGpu(
        "0000:1b:00.0", "nvidia", "2330", "nvidia", 0, 16, 16, "32.0 GT/s PCIe", "030200"
    )
    assert (len(observed.pci), observed.nvswitches, observed.driver) == (8, 4, "535.129.03")
    assert (observed.cuda, observed.fabric_manager) == ("12.2", "running")
    assert observed.device_files[-1] == DeviceFile("/dev/nvidiactl", "crw-rw-rw-", 0, 0)
    assert len(observed.gpus[7].links) == 18


@pytest.mark.parametrize("text", [
    "/sys/bus/pci/devices/../../etc/x/vendor:0x10de\n",
    "/sys/bus/pci/devices/0000:1b:00.0/vendor:0x10de\n",
    "/sys/bus/pci/devices/0000:1b:00.0/class:0x030200\n",
    BUS.replace("0x030200", "?"),
    "\x1b[31m\udcff\x00:1:\n",
])  # fmt: skip
def test_nonsense_on_the_bus_is_no_gpu(text):
    assert pci_bus.parse_pci(text).pci == ()


@pytest.mark.parametrize(
    "output", [Output("", None), Output("", 2), Output(BUS, None, truncated=True)]
)
def test_a_bus_that_cannot_be_read(output):
    with pytest.raises(ProbeError):
        pci_bus.parse({pci_bus.SECTION.name: output}, Policy())


# tests/lab/test_units_busybox.py asks the same of busybox.
@pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"]], ids=" ".join)
def test_the_script_reads_only_gpus(shell, tmp_path):
    root = tmp_path / "sys/bus/pci/devices"
    text = BUS + "".join(map(switch, SWITCHES)) + SERVER
    text += pci("0000:1b:00.1", device="0x10fa", kind="0x040300", driver="snd_hda_intel")
    text += pci("0000:1b:00.4")  # a virtual function
    files: dict[str, str] = {}
    for line in text.splitlines():
        path, _, rest = line.rpartition("/")
        name, _, value = rest.partition(":")
        files[f"{path}/{name}"[1:]] = files.get(f"{path}/{name}"[1:], "") + f"{value}\n"
    run_on(tmp_path, "", shell, files)
    (root / "0000:1b:00.4" / "physfn").symlink_to("../0000:1b:00.0")
    # In sysfs the entry is a link: above it is the port that leads to the GPU.
    port = tmp_path / "sys/devices/pci0000:1a/0000:1a:01.0"
    port.mkdir(parents=True)
    (root / "0000:1b:00.0").rename(port / "0000:1b:00.0")
    (root / "0000:1b:00.0").symlink_to(port / "0000:1b:00.0")
    counts = "Undefined 0\nDLP 0\nSDES 2\nTLP 0\nUnsupReq 10\nTOTAL_ERR_FATAL 12\n"
    (port / "aer_dev_fatal").write_text(counts)
    (port / "0000:1b:00.0/aer_dev_fatal").write_text(counts.replace("2\n", "0\n"))
    (port / "0000:1b:00.0/aer_dev_nonfatal").write_text("CmpltTO 3\nTOTAL_ERR_NONFATAL 3\n")
    done = run_on(tmp_path, pci_bus.SECTION.script(Policy()), shell)
    assert done.returncode == 0
    bus = pci_bus.parse_pci(done.stdout)
    assert tuple(gpu.address for gpu in bus.pci) == ADDRESSES
    assert (bus.nvswitches, bus.pci[0].driver) == (4, "nvidia")
    assert bus.pci[0].aer == (("nonfatal", "CmpltTO", 3), ("fatal", "SDES", 2))
    # What is 0 is not sent.
    assert "DLP" not in done.stdout
    assert {gpu.aer for gpu in bus.pci[1:]} == {()}
    assert "0000:03:00.0" not in done.stdout
