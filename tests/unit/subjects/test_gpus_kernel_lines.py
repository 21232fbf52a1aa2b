"""Lines of the kernel's log, and the verdict that an expert gives: on the node's own awk, and here.

Every line of a table has a device of its own, and all of them stand in one log.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.gpus.gpu import Gpu, Gpus, PciGpu, Tool
from nodeready.subjects.gpus.health import kernel_faults
from tests import paths

POLICY = Policy()
BOOT = "[    0.000000] Linux version 6.8\n"
RAS = "Linux amdgpu_ras.c"
UMC = "Linux amdgpu_umc.c"
AER = "Linux drivers/pci/pcie/aer.c"
DPC = "Linux drivers/pci/pcie/dpc.c"
EEPROM = "Linux amdgpu_ras_eeprom.c"
KFD = "Linux drivers/gpu/drm/amd/amdkfd"
DEVICE = "Linux amdgpu_device.c"
SMU = "Linux drivers/gpu/drm/amd/pm/swsmu/smu_cmn.c"
MES = "Linux mes_v11_0.c, mes_v12_0.c"
RING = "Linux amdgpu_job.c, amdgpu_ring.c"
XGMI = "Linux amdgpu_xgmi.c"
CATALOG = "NVIDIA Xid catalog"
FM = "NVIDIA Fabric Manager user guide, SXids"
RM = "open-gpu-kernel-modules"
GPUD = "leptonai/gpud"


def device(index: int) -> str:
    return f"{index >> 8:04x}:{index & 255:02x}:00"


def read(log: str, tmp_path: Path, awk: str = "awk", journal: bool = False) -> Output:
    """What the section's own script makes of this log."""
    (tmp_path / "log").write_text(log)
    programs = {
        "dmesg": "exit 1" if journal else f"cat {tmp_path}/log",
        "journalctl": f"cat {tmp_path}/log" if journal else "exit 1",
    }
    if awk != "awk":
        programs["awk"] = 'exec /bin/busybox awk "$@"'
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", shell.minify(kernel_log.SECTION.script(POLICY))],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "NR": "a1b2", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return Output(done.stdout, done.returncode, nonce="a1b2")


def node(output: Output, addresses: list[str], **gpu: object) -> Gpus:
    faults, log = kernel_log.parse(output)
    pci = tuple(PciGpu(a, "amd", "74a1", "amdgpu", pci_class="120000") for a in addresses)
    return Gpus(
        pci=pci,
        amd=tuple(Gpu(n, "amd", a, **gpu) for n, a in enumerate(addresses)),
        amd_tool=Tool("amd-smi", "ok"),
        kernel_faults=kernel_log.of_gpus(faults, addresses),
        kernel_log=log,
    )


def verdict(seen: Gpus, address: str) -> str:
    """The verdict for what the log says of this device alone."""
    alone = tuple(f for f in seen.kernel_faults if f.pci_address == address)
    only = Gpus(
        pci=seen.pci,
        amd=seen.amd,
        amd_tool=seen.amd_tool,
        kernel_faults=alone,
        kernel_log=seen.kernel_log,
    )
    return kernel_faults(only, POLICY).status


AMD = "amdgpu {d}.0: amdgpu: "

#: (lines, verdict, source); {d}: the device, without its function.
LINES: tuple[tuple[str, str, str], ...] = (
    # --- amdgpu: errors that RAS counts.
    (AMD + "2 uncorrectable hardware errors detected in umc block", "fail", RAS),
    (AMD + "{{14}}2 uncorrectable hardware errors detected in umc block", "fail", RAS),
    (AMD + "{{7}}socket: 0, die: 1, 2 new uncorrectable hardware errors detected in gfx block", "fail", RAS),
    (AMD + "{{7}}socket: 0, die: 1, 3 uncorrectable hardware errors detected in total in gfx block", "fail", RAS),
    (AMD + "socket: 0, die: 0 1 uncorrectable hardware errors detected in umc block", "fail", RAS),
    (AMD + "1 uncorrectable errors detected in PCIE_BIF block", "fail", "Linux 5.4 nbio_v7_4.c"),
    (AMD + "1 uncorrectable hardware errors detected in UMC block", "fail", UMC),
    (AMD + "1 uncorrectable hardware errors and 0 deferred hardware errors detected in UMC block", "fail", UMC),
    (AMD + "0 uncorrectable hardware errors and 3 deferred hardware errors detected in UMC block", "warn", UMC),
    (AMD + "0 uncorrectable hardware errors and 0 deferred hardware errors detected in UMC block", "ok", UMC),
    (AMD + "4 new deferred hardware errors detected", "warn", UMC),
    (AMD + "{{9}}socket: 0, die: 2, 1 new deferred hardware errors detected in umc block", "warn", RAS),
    (AMD + "{{9}}socket: 0, die: 2, 1 deferred hardware errors detected in total in umc block", "warn", RAS),
    (AMD + "{{9}}1 deferred hardware errors detected in umc block", "warn", RAS),
    (AMD + "0 uncorrectable hardware errors detected in umc block", "ok", RAS),
    (AMD + "{{14}}0 uncorrectable hardware errors detected in umc block", "ok", RAS),
    (AMD + "{{10}}socket: 0, die: 0, 0 deferred hardware errors detected in total in umc block", "ok", RAS),
    (AMD + "no uncorrectable hardware errors detected in gfx block", "ok", RAS),
    (AMD + "5 correctable hardware errors detected in umc block, no user action is needed.", "ok", RAS),
    (AMD + "{{9}}socket: 0, die: 2, 7 new correctable hardware errors detected in umc block", "ok", RAS),
    (AMD + "{{9}}socket: 0, die: 2, 7 correctable hardware errors detected in total in umc block", "ok", RAS),
    (AMD + "1048560 uncorrectable hardware errors detected in umc block", "ok", "all registers read as ones"),
    (AMD + "2097120 uncorrectable hardware errors detected in umc block", "ok", "all registers read as ones"),
    (AMD + "1048560 uncorrectable hardware errors detected in umc block\n" + AMD
     + "1 uncorrectable hardware errors detected in umc block", "fail", RAS),
    (AMD + "uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "fail", RAS),
    (AMD + "Uncorrectable hardware error (ERREVENT_ATHUB_INTERRUPT) detected!", "fail", RAS),
    (AMD + "RAS controller interrupt triggered by NBIF error", "fail", "Linux nbio_v7_9.c"),
    ("amdgpu {d}.0: {{14}}poison is consumed by client 12, kick off gpu reset flow", "fail", KFD),
    (AMD + "poison is consumed by client 5, kick off gpu reset flow", "fail", KFD),
    (AMD + "RAS poison consumption, fall back to gpu reset flow: client id 18", "fail", KFD),
    (AMD + "GPU reset for gfx RAS poison consumption is issued!", "fail", RAS),
    (AMD + "{{3}} socket: 0, die: 0, 1 new poison consumption detected in gfx block", "fail", "Linux ras/rascore"),
    (AMD + "RAS poison consumption, unmap queue flow succeeded: client id 18", "warn", KFD),
    (AMD + "{{15}}Poison is created", "warn", RAS),
    (AMD + "Poison is created, no user action is needed.", "warn", RAS),
    (AMD + "No RAS poison status in gfx poison IH.", "ok", RAS),
    (AMD + "XGMI PCS DataLossErr detected", "fail", XGMI),
    (AMD + "WAFL PCS CRCErr detected", "fail", XGMI),
    (AMD + "2 uncorrectable hardware errors detected in xgmi_wafl block", "fail", XGMI),
    (AMD + "socket: 0, aid: 1, fw_status: 0x10, wafl link training failed", "fail", RAS),
    (AMD + "socket: 0, aid: 1, fw_status: 0x10, xgmi link training failed", "fail", RAS),
    (AMD + "socket: 0, aid: 1, hbm: 2, fw_status: 0x10, memory training failed", "fail", RAS),
    (AMD + "socket: 0, aid: 1, hbm: 2, fw_status: 0x10, hbm bist test failed", "fail", RAS),
    (AMD + "socket: 0, aid: 1, fw_status: 0x10, firmware load failed at boot time", "fail", RAS),
    (AMD + "socket: 0, aid: 1, fw_status: 0x10, data abort exception", "fail", RAS),
    # --- amdgpu: bad pages.
    (AMD + "Saved bad pages 150 reaches threshold value 128", "fail", EEPROM),
    (AMD + "RAS records:300 exceed threshold:256, GPU will not be initialized.", "fail", EEPROM),
    (AMD + "RAS records:300 exceed threshold:256", "fail", EEPROM),
    (AMD + "RAS records:240 exceeds 90% of threshold:256", "warn", EEPROM),
    (AMD + "records:120 threshold:256, resetting RAS table header signature", "ok", EEPROM),
    (AMD + "Found existing EEPROM table with 12 records", "ok", EEPROM),
    # --- amdgpu: hangs, resets, devices that are lost.
    (AMD + "ring comp_1.0.1 timeout, signaled seq=44, emitted seq=46", "fail", RING),
    ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=9 of {d}.0", "fail", RING),
    (AMD + "ring comp_1.0.1 timeout, but soft recovered", "ok", RING),
    (AMD + "Ring gfx_0.0.0 reset failed", "fail", RING),
    (AMD + "ring kiq_2.1.0 test failed (-110)", "fail", RING),
    (AMD + "IB test failed on gfx_0.0.0 (-110).", "fail", RING),
    (AMD + "ring gfx_0.0.0 uses VM inv eng 0 on hub 0", "ok", RING),
    (AMD + "GPU reset begin!", "fail", DEVICE),
    (AMD + "GPU reset begin!. Source:  3", "fail", DEVICE),
    (AMD + "GPU reset begin!\n" + AMD + "GPU reset(2) succeeded!", "ok", DEVICE),
    (AMD + "GPU reset begin!\n" + AMD + "GPU reset(2) failed", "fail", DEVICE),
    (AMD + "GPU reset end with ret = -22", "fail", DEVICE),
    (AMD + "GPU mode1 reset failed", "fail", DEVICE),
    (AMD + "Mode2 reset failed!", "fail", DEVICE),
    (AMD + "MODE1 reset", "ok", DEVICE),
    (AMD + "GPU Recovery Failed: -19", "fail", DEVICE),
    (AMD + "ring sdma0 timeout, signaled seq=1\n" + AMD + "GPU reset(1) succeeded!", "warn", DEVICE),
    (AMD + "ring sdma0 timeout, signaled seq=1\n" + AMD + "Ring sdma0 reset succeeded", "warn", RING),
    (AMD + "2 uncorrectable hardware errors detected in umc block\n" + AMD + "GPU reset(1) succeeded!", "warn", DEVICE),
    # The reset of a ring does not touch the memory.
    (AMD + "2 uncorrectable hardware errors detected in umc block\n" + AMD + "Ring sdma0 reset succeeded", "fail", RING),
    (AMD + "GPU reset(1) failed\n" + AMD + "Ring sdma0 reset succeeded", "fail", RING),
    (AMD + "GPU reset(1) succeeded!\n" + AMD + "2 uncorrectable hardware errors detected in umc block", "fail", DEVICE),
    (AMD + "Saved bad pages 150 reaches threshold value 128\n" + AMD + "GPU reset(1) succeeded!", "fail", EEPROM),
    (AMD + "device lost from bus!", "fail", DEVICE),
    (AMD + "device lost from bus!\n" + AMD + "GPU reset(1) succeeded!", "fail", DEVICE),
    (AMD + "SMU: response:0xFFFFFFFF for index:18 param:0x00000005 message:TransferTableSmu2Dram?", "fail", SMU),
    (AMD + "SMU: I'm not done with your previous command: SMN_C2PMSG_66:0x00000012", "fail", SMU),
    (AMD + "SMU: No response msg_reg: 32 resp_reg: 0", "fail", SMU),
    (AMD + "SMU is initialized successfully!", "ok", SMU),
    ("amdgpu {d}.0: Unable to change power state from D3cold to D0, device inaccessible", "fail", "Linux pci.c"),
    (AMD + "Fatal error during GPU init", "fail", DEVICE),
    (AMD + "Fatal error during GPU init\n[drm] Initialized amdgpu 3.57.0 20150101 for {d}.0 on minor 1", "ok", DEVICE),
    (AMD + "Fatal error during GPU init\namdgpu {d}.0: [drm] Initialized amdgpu 3.61.0 for {d}.0 on minor 1", "ok", DEVICE),
    ("[drm] Initialized amdgpu 3.57.0 20150101 for {d}.0 on minor 1\n" + AMD + "Fatal error during GPU init", "fail", DEVICE),
    (AMD + "hw_init of IP block <psp> failed -22", "fail", DEVICE),
    (AMD + "resume of IP block <gfx_v9_4_3> failed -110", "fail", DEVICE),
    (AMD + "amdgpu_device_ip_init failed", "fail", DEVICE),
    ("amdgpu: probe of {d}.0 failed with error -22", "fail", DEVICE),
    ("amdgpu {d}.0: probe with driver amdgpu failed with error -22", "fail", DEVICE),
    (AMD + "PCI error: detected callback!!", "fail", DEVICE),
    (AMD + "MES failed to respond to msg=REMOVE_QUEUE", "fail", MES),
    (AMD + "MES(1) failed to respond to msg=ADD_QUEUE", "fail", MES),
    (AMD + "MES might be in unrecoverable state, issue a GPU reset", "fail", MES),
    (AMD + "MES ring buffer is full.", "fail", MES),
    (AMD + "Failed to evict queue 3", "fail", KFD),
    (AMD + "Failed to restore process queues", "fail", KFD),
    (AMD + "Queue preemption failed for queue with doorbell_id: 80004008", "fail", KFD),
    (AMD + "[gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:3 pasid:32771)", "ok", "Linux gmc_v9_0.c"),
    (AMD + "[gfxhub] page fault (src_id:0 ring:24 vmid:3 pasid:32771)", "ok", "Linux gmc_v11_0.c"),
    (AMD + "[mmhub0] retry page fault (src_id:0 ring:24 vmid:3 pasid:32771)", "ok", "Linux gmc_v9_0.c"),
    (AMD + "WARN: GPU is throttled, expect performance decrease. HBM.", "warn", "Linux smu_v13_0_6_ppt.c"),
    (AMD + "WARN: GPU is throttled, expect performance decrease. Prochot and PPT.", "warn", "Linux smu_v13_0_6_ppt.c"),
    (AMD + "WARN: GPU is throttled, expect performance decrease. PPT.", "ok", "Linux smu_v13_0_6_ppt.c"),
    ("[drm:xgpu_ai_mailbox_trans_msg [amdgpu]] *ERROR* trn=2 ACK should not assert! wait again ! {d}.0", "ok", "Linux mxgpu_ai.c"),
    (AMD + "RAS: optional ras ta ucode is not available", "ok", "Linux psp"),
    (AMD + "SRAM ECC is active.", "ok", "Linux gmc"),
    (AMD + "HBM ECC is active.", "ok", "Linux gmc"),
    (AMD + "RAS INFO: ras initialized successfully, hardware ability[7fff] ras_mask[7fff]", "ok", RAS),
    # --- The PCI bus.
    ("amdgpu {d}.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)", "fail", AER),
    ("nvidia {d}.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, id=0018(Requester ID)", "fail", AER),
    ("nvidia {d}.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Requester ID)", "warn", AER),
    ("nvidia {d}.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)", "ok", AER),
    ("nvidia {d}.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)", "ok", AER),
    ("pcieport ffff:3a:00.0: AER: Uncorrectable (Fatal) error message received from {d}.0", "fail", AER),
    ("pcieport ffff:3a:00.0: AER: Uncorrected (Fatal) error received: {d}.0", "fail", AER),
    ("pcieport ffff:3a:00.0: AER: Multiple Uncorrected (Non-Fatal) error received: {d}.0", "warn", AER),
    ("pcieport ffff:3a:00.0: AER: Corrected error received: {d}.0", "ok", AER),
    ("pcieport ffff:3a:00.0: AER: Multiple Correctable error message received from {d}.0", "ok", AER),
    ("nvidia {d}.0: Unable to change power state from D3cold to D0, device inaccessible", "fail", "Linux pci.c"),
    ("nvidia {d}.0: AER: aer_status: 0x00000001, aer_mask: 0x00000000", "ok", AER),
    ("nvidia {d}.0: enabling device (0140 -> 0142)", "ok", "Linux pci.c"),
    # --- NVIDIA's driver.
    ("NVRM: GPU {d}.0: GPU has fallen off the bus.", "fail", RM),
    ("NVRM: The NVIDIA GPU {d}.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
     "NVRM: fallen off the bus and is not responding to commands.", "fail", RM),
    ("NVRM: The NVIDIA GPU {d}.0 (PCI ID: 10de:1e07) installed in this\n"
     "NVRM: system has fallen off the bus and is not responding to commands.", "fail", RM),
    ("NVRM: GPU at PCI:{d}: GPU-11111111-2222-3333-4444-555555555555\n"
     "NVRM: GPU Board Serial Number: 1650124014249\n"
     "NVRM: Xid (PCI:{d}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "fail", CATALOG),
    ("NVRM: The NVIDIA GPU {d}.0 (PCI ID: 10de:1180)\nNVRM: installed in this system is not supported by the\n"
     "NVRM: NVIDIA 570.133.20 driver release.", "ok", RM),
    ("NVRM: GPU {d}.0: RmInitAdapter failed! (0x62:0x55:2477)", "fail", RM),
    ("NVRM: GPU {d}.0: rm_init_adapter failed, device minor number 3", "fail", RM),
    ("NVRM: GPU {d}.0: GPU serial number is 1650124014249.", "ok", RM),
    ("NVRM: GPU{d}: nvAssertFailedNoLog: Assertion failed: 0 @ gpu.c:12", "ok", RM),
    ("nvidia-nvswitch0: SXid (PCI:{d}.0): 20034, Fatal, Link 30 LTSSM Fault Up", "fail", FM),
    ("nvidia-nvswitch0: SXid (PCI:{d}.0): 11004, Non-fatal, Link 46 ingress invalid ACL", "warn", FM),
    ("nvidia-nvswitch0: SXid (PCI:{d}.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00", "warn", FM),
    ("nvidia-nvswitch0: using MSI {d}", "ok", FM),
    # --- Xids: the words of a process are not the driver's.
    ("NVRM: Xid (PCI:{d}): 145, pid=7, name=Fatal, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x00000082 0x1)", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, pid=7, name=A Fatal XC1, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x82 0x1)", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, pid=7, name=A Fatal, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x82 0x1)", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, pid='<unknown>', name=<unknown>, RLW_REMAP Fatal   XC1 i0 Link 02 (0x82 0x40)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, pid=7, name=Nonfatal, RLW_REMAP Fatal XC1 i0 Link 02 (0x82 0x40)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0 0x0)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 145, pid=7, name=Fatal, RLW_REMAP Nonfatal XC1 i0 Link 02 (0x82 0x1)\n"
     "NVRM: Xid (PCI:{d}): 145, pid=8, name=x, RLW_REMAP Fatal XC1 i0 Link 02 (0x82 0x40)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 149, NETIR_LINK_EVT  Nonfatal XC0 i0 Link 08 (0x004505c6 0x00000000)", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 144, SAW_MVB Non-fatal XC0 i0 Link -1 (0x00000001 0x1)", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 146, TLW_RX/TLW_RX_PIPE0 Fatal XC0 i0 Link 03 (0x00000143 0x4)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 13, pid=7, name=Fatal, Graphics Exception: ESR 0x51cf30=0x0", "ok", CATALOG),
    ("NVRM: Xid (PCI:{d}): 31, pid=7, name=a, 79, GPU x, Ch 00000008, intr 00000000", "ok", CATALOG),
    ("NVRM: Xid (PCI:{d}): 43, pid=7, name='<unknown>', Ch 00000008", "ok", CATALOG),
    ("NVRM: Xid (PCI:{d}): 45, Ch 0000007c", "ok", CATALOG),
    ("NVRM: Xid ({d}): 79, GPU has fallen off the bus.", "fail", "drivers before 304"),
    ("NVRM: Xid (PCI:{d} GPU-I:05): 94, pid=7, name=x, Contained: SM (0x1).", "warn", CATALOG),
    ("NVRM: Xid (PCI:{d}): 154, pid=7, name=a to 0x0 (None), GPU recovery action changed from 0x0 (None)"
     " to 0x2 (Node Reboot Required)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 154, pid=7, name=Fatal, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)\n"
     "NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "ok", CATALOG),
    ("NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "fail", CATALOG),
    ("NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)", "warn", "nvml.h"),
    ("NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x0 (None) to 0x6 (Bus Reset)", "fail", "nvml.h"),
    ("NVRM: Xid (PCI:{d}): 154, GPU recovery action changed from 0x0 (None) to 0x7 (System Reboot)", "fail", "nvml.h"),
)  # fmt: skip

#: Lines that name no device, each in a log of its own.
UNNAMED = (
    ("NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!", "fail", GPUD),
    ("NVRM: knvlinkDiscoverPostRxDetLinks_GB100_REV2: Getting peer17 postRxDetLinkMask failed!", "fail", GPUD),
    ("NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!", "fail", GPUD),
    ("NVRM: API mismatch: the client has the version 570.133.20, but", "warn", RM),
    ("NVRM: rm_init_adapter failed for device bearing minor number 0", "fail", RM),
    ("NVRM: NVLink link training completed", "ok", GPUD),
    ("NVRM: Persistence mode is deprecated and will be removed in a future release.", "ok", RM),
    ("nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  570.133.20", "ok", RM),
    ("nvidia-modeset: ERROR: GPU:0: Idling display engine timed out: 0x0000c37e:0:0:1085", "ok", RM),
    ("nvidia-uvm: Loaded the UVM driver, major device number 511.", "ok", RM),
    ("amdgpu: qcm fence wait loop timeout expired", "fail", KFD),
    ("amdgpu: The cp might be in an unrecoverable state due to an unsuccessful queues preemption", "fail", KFD),
    ("kfd kfd: amdgpu: Failed to evict process queues", "fail", KFD),
    ("kfd kfd: amdgpu: added device 1002:74a1", "ok", KFD),
    ("[drm] amdgpu kernel modesetting enabled.", "ok", DEVICE),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "ok", "Linux edac_mc.c"),
    ("mce: [Hardware Error]: Machine check events logged", "ok", "Linux mce"),
    ("mlx5_core 0000:41:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count", "ok",
     "of a NIC, not of a GPU"),
    ("pcieport 0000:3a:00.0: AER: Uncorrectable (Fatal) error message received from 0000:3b:00.0", "ok",
     "of a device that is no GPU"),
    ("pcieport 0000:3a:00.0: DPC: containment event, status:0x1f01 source:0x3b00", "ok", "of a device that is no GPU"),
)  # fmt: skip


def log_of(rows: tuple[tuple[str, str, str], ...]) -> str:
    lines, at = [BOOT], 10.0
    for index, (text, _, _) in enumerate(rows):
        for line in text.format(d=device(index)).split("\n"):
            at += 0.5
            lines.append(f"[ {at:11.6f}] {line}\n")
    return "".join(lines)


@pytest.fixture(scope="module", params=["awk", "busybox awk"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    """The node in whose log the lines of the table stand."""
    if request.param != "awk" and not Path("/bin/busybox").exists():
        pytest.skip("no busybox here")
    output = read(log_of(LINES), tmp_path_factory.mktemp("log"), request.param)
    return node(output, [f"{device(index)}.0" for index in range(len(LINES))])


@pytest.mark.parametrize("index", range(len(LINES)))
def test_a_line_gets_the_verdict_of_its_source(seen: Gpus, index: int) -> None:
    text, wanted, source = LINES[index]
    assert verdict(seen, f"{device(index)}.0") == wanted, f"{text} ({source})"


def test_no_line_of_the_table_counts_for_another_device(seen: Gpus) -> None:
    assert {fault.pci_address for fault in seen.kernel_faults} <= {gpu.address for gpu in seen.pci}


@pytest.mark.parametrize(("text", "wanted", "source"), UNNAMED)
def test_a_line_without_a_device_gets_its_verdict(
    tmp_path: Path, text: str, wanted: str, source: str
) -> None:
    seen = node(read(f"{BOOT}[   99.000001] {text}\n", tmp_path), ["0000:05:00.0"])
    assert kernel_faults(seen, POLICY).status == wanted, source


def test_a_port_tells_the_error_of_the_device_behind_it(tmp_path: Path) -> None:
    line = "pcieport 0000:3a:00.0: DPC: containment event, status:0x1f07 source:0x3b00"
    seen = node(read(f"{BOOT}[   99.000001] {line}\n", tmp_path), ["0000:3b:00.0"])
    result = kernel_faults(seen, POLICY)
    assert (result.status, "gpu 0 (0000:3b:00.0)" in result.actual) == ("fail", True)


FALLEN = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


@pytest.mark.parametrize("awk", ["awk", "busybox awk"])
def test_a_sentence_of_three_lines_names_its_device(tmp_path: Path, awk: str) -> None:
    """In the journal, the lines of one record are indented behind its first."""
    pad = "\n" + " " * 28
    record = f"[   99.000001] gpu1 kernel: {pad.join(FALLEN)}\n"
    boot = BOOT.replace("] ", "] gpu1 kernel: ")
    faults, _ = kernel_log.parse(read(boot + record, tmp_path, awk, journal=True))
    assert [(f.pci_address, f.action) for f in faults] == [("0000:b3:00.0", "REBOOT")]
    # Behind another's line, the same words are a user's.
    forged = record.replace("kernel: ", f"kernel: process '/x{pad}", 1)
    assert kernel_log.parse(read(boot + forged, tmp_path, awk, journal=True))[0] == ()


#: NVIDIA's Xid catalog: verdict -> codes, without a later word of the driver.
XIDS = {
    "ok": (8, 11, 13, 14, 25, 31, 32, 39, 40, 41, 43, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82)
    + (83, 84, 85, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 126, 127)
    + (128, 129, 130, 131, 132, 133, 134, 135, 137, 139),
    "warn": (37, 38, 44, 63, 66, 67, 78, 92, 93, 94, 121, 141, 142, 144, 145, 146, 147, 148, 149, 150)
    + (152, 153, 157, 159, 160, 161, 162, 163, 164, 165, 166, 167, 168, 169, 170, 61, 123, 999),
    "fail": (46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158)
    + (171, 172),
}  # fmt: skip
#: Those whose fault is over when the driver's recovery action is None (column "Xid 154 linkage").
LINKED = {48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 171, 172}
CODES = [(code, wanted) for wanted, codes in XIDS.items() for code in codes]


def after(code: int, recovery: str | None, named: bool, driver: str | None = "575.57.08") -> str:
    """The verdict on a node whose log has this Xid."""
    fault = kernel_log.KernelFault(
        "xid", code, "0000:5e:00.0", "", kernel_log.action_of(code, "text")
    )
    seen = Gpus(
        pci=(PciGpu("0000:5e:00.0", "nvidia", "2330", "nvidia", pci_class="030200"),),
        nvidia=(Gpu(3, "nvidia", "0000:5e:00.0", recovery=recovery, recovery_named=named),),
        nvidia_tool=Tool("nvidia-smi", "ok"),
        driver=driver,
        kernel_faults=(fault,),
        kernel_log=Tool("kernel log", "ok", "dmesg"),
    )
    return kernel_faults(seen, POLICY).status


@pytest.mark.parametrize(("code", "wanted"), CODES)
def test_every_code_of_the_catalog(code: int, wanted: str) -> None:
    assert after(code, None, False) == wanted
    # Schema v12: `reset_required` says No.
    assert after(code, "none", False) == wanted
    # Schema v13: the driver names its action.
    answered = "warn" if code in LINKED else wanted
    assert after(code, "none", True) == answered


def test_the_table_has_every_known_code() -> None:
    assert {code for code, _ in CODES} >= set(kernel_log.XIDS) - {154}
    assert len(CODES) == len({code for code, _ in CODES}) > 100


@pytest.mark.parametrize(
    ("code", "driver", "wanted"),
    [
        (109, "565.57.01", "fail"),
        (109, "570.86.15", "warn"),
        (143, "570.86.15", "fail"),
        (143, "575.51.03", "warn"),
        (95, "550.54.15", "fail"),
        (95, "", "warn"),
    ],
)
def test_a_driver_answers_only_for_the_codes_that_it_links(
    code: int, driver: str, wanted: str
) -> None:
    assert after(code, "none", True, driver) == wanted


NAMES = st.text(st.characters(codec="ascii", exclude_characters="\n\0"), max_size=15)


@settings(max_examples=200, deadline=None)
@given(NAMES, st.sampled_from(("Fatal", "Nonfatal")))
def test_no_name_of_a_process_changes_the_severity(name: str, severity: str) -> None:
    text = (
        f"NVRM: Xid (PCI:0000:5e:00): 145, pid=7, name={name}, RLW_REMAP {severity} XC1 i0 Link 02"
        " (0x00000082 0x00000001)"
    )
    wanted = {"Fatal": "RESET", "Nonfatal": "MONITOR"}[severity]
    assert kernel_log.action_of(145, text) == wanted
    assert re.search(kernel_log._FATAL, text) is None or severity == "Fatal"


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_no_name_of_a_process_takes_the_drivers_demand_back(name: str) -> None:
    text = (
        f"NVRM: Xid (PCI:0000:5e:00): 154, pid=7, name={name}, GPU recovery action changed from"
        " 0x0 (None) to 0x2 (Node Reboot Required)"
    )
    assert kernel_log.action_of(154, text) == "REBOOT"


def test_the_lines_of_amds_own_scraper(tmp_path: Path) -> None:
    """Recorded with another format of the time."""
    sample = paths.SAMPLES / "kmsg" / "dmesg-amd-node-scraper.txt"
    text = (
        sample.read_text()
        if sample.exists()
        else (
            "kern  :info  : 2026-01-07T10:00:00,123456-06:00 Linux version 5.15.0\n"
            "kern  :err   : 2026-01-07T10:02:00,123456-06:00 amdgpu 0000:01:00.0: {14}poison is"
            " consumed by client 12, kick off gpu reset flow\n"
            "kern  :err   : 2026-01-07T10:02:01,345678-06:00 amdgpu 0000:02:00.0: amdgpu: Saved bad"
            " pages 150 reaches threshold value 128\n"
        )
    )
    faults, tool = kernel_log.parse(read(text, tmp_path))
    assert tool.works
    worst = {fault.pci_address: fault.action for fault in faults if fault.action != "MONITOR"}
    assert worst == {"0000:01:00.0": "RESET", "0000:02:00.0": "ISOLATE"}
