"""Kernel command lines and boot loaders: as a node shows them, judged, and changed by a deploy."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.base import Line, Output, ProbeError, kernel_arguments
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.operations.iommu import args as step
from nodeready.operations.iommu import grub_piece
from nodeready.runs.deploy.actions import PlanError, RemoveFile, RunCommand, WriteFile
from nodeready.subjects.iommu import checks
from nodeready.subjects.iommu import facts as probe
from nodeready.subjects.iommu.facts import Entry, Iommu
from tests.builders.judging import actions_of, by_id, judge_all
from tests.builders.sections import exact
from tests.cases import as_tuples, cases

DATA = "data/iommu.json"


@pytest.mark.parametrize("case", cases(__file__, DATA, "tokens"))
def test_tokens_split_at_blanks_outside_quotes_and_end_at_two_dashes(case):
    assert kernel_arguments(case["text"]) == tuple(case["tokens"])


@pytest.mark.parametrize("case", cases(__file__, DATA, "compare"))
def test_missing_and_contradicting_arguments(case):
    """The kernel's kernel-parameters.txt, arch/x86/kernel/pci-dma.c, drivers/iommu/iommu.c and
    drivers/iommu/{intel/iommu.c,amd/init.c}.
    """
    wanted = kernel_arguments(case["wanted"])
    expected = tuple(case.get("missing", ())), tuple(case.get("contradicting", ()))
    for text in case["present"]:
        present = kernel_arguments(text)
        differences = probe.missing(present, wanted), probe.contradicting(present, wanted)
        assert differences == expected, text


@pytest.mark.parametrize("case", cases(__file__, DATA, "configured"))
def test_what_grubs_configuration_makes(case):
    lines = [Line("/etc/default/grub", at, text) for at, text in enumerate(case["lines"], 1)]
    tokens = case["tokens"]
    assert probe.configured(lines).tokens == (None if tokens is None else tuple(tokens))


TEXTS = Path(__file__).parent / "data" / "iommu"
GRUB = (TEXTS / "grub.cfg").read_text()
#: Boot loader entries: the title, and the last argument.
ENTRIES = {
    "abc-5.14.0-503.el9.x86_64": ("Rocky Linux (5.14.0-503) 9.5", "new"),
    "abc-5.14.0-70.el9.x86_64": ("Rocky Linux (5.14.0-70) 9.0", "old"),
    "abc-0-rescue": ("Rocky Linux (0-rescue) 9.5", "rescue"),
}


def booting(family: str, files: dict[str, str]) -> tuple[str, str]:
    """The last argument of the entry that boots, and the script that wrote the entry."""
    lines = {
        path: [Line(path, at, text) for at, text in enumerate(content.split("\n"), 1)]
        for path, content in files.items()
        if content
    }
    entry, _ = probe.find_next_boot(lines, family)
    assert entry is not None
    return entry.tokens[-1], entry.script


@pytest.mark.parametrize("case", cases(__file__, DATA, "menu"))
def test_the_entry_of_its_menu_that_grub_boots(case):
    """GRUB's manual, "default"; grub-core/normal/menu.c (get_entry_number, run_menu)."""
    script = "40_custom" if case["entry"] == "own" else "10_linux"
    settings = [(default, "") for default in case["default"]]
    for default, env in [*settings, *((value, env) for env, value in case.get("env", {}).items())]:
        menu = GRUB.replace("DEFAULT", default)
        files = {"/boot/grub/grub.cfg": menu, "/boot/grub/grubenv": env}
        assert booting("debian", files) == (case["entry"], script), (default, env)


@pytest.mark.parametrize("case", cases(__file__, DATA, "entries"))
def test_the_boot_loader_entry_that_boots(case):
    """blscfg.c of RHEL's grub2; systemd-boot(7), loader.conf(5)."""
    files = {
        f"/boot/loader/entries/{name}.conf": f"title {title}\nlinux /vmlinuz\noptions ro {word}"
        for name, (title, word) in ENTRIES.items()
    }
    if case["family"] == "redhat":
        files["/boot/grub2/grub.cfg"] = 'set default="${saved_entry}"\nblscfg\n'
    for env in case.get("env", ()):
        assert booting("redhat", {**files, "/boot/grub2/grubenv": env}) == (case["entry"], ""), env
    for loader in case.get("loader", ()):
        loaders = {**files, "/boot/loader/loader.conf": loader}
        assert booting("debian", loaders) == (case["entry"], ""), loader


@pytest.mark.parametrize(("blscfg", "entry"), [("", "first"), ("blscfg", "bls")])
def test_a_menu_of_its_own_decides_where_boot_loader_entries_are_off(blscfg, entry):
    """GRUB_ENABLE_BLSCFG=false: grub.cfg has entries, and no blscfg."""
    files = {
        "/boot/grub2/grub.cfg": GRUB.replace("DEFAULT", "0") + blscfg,
        "/boot/loader/entries/abc-5.14.conf": "options ro bls",
    }
    assert booting("redhat", files)[0] == entry


def run_piece(posix_sh: list[str], before: str, args: tuple[str, ...]) -> list[str]:
    """GRUB_CMDLINE_LINUX and _DEFAULT after `before` and our piece, under `set -e`."""
    show = r'printf "%s\n" "$GRUB_CMDLINE_LINUX" "$GRUB_CMDLINE_LINUX_DEFAULT"'
    script = f"set -e\n{before}\n{grub_piece(args).decode()}\n{show}\n"
    done = subprocess.run(posix_sh, input=script.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\n")[:2]


@pytest.mark.parametrize("case", cases(__file__, DATA, "piece"))
def test_other_arguments_keep_their_order_and_text(posix_sh, case):
    args, after = tuple(case.get("args", ["iommu=pt"])), case["after"]
    for linux, default in ((case["linux"], case.get("default", "")), after):
        before = f"GRUB_CMDLINE_LINUX='{linux}'\nGRUB_CMDLINE_LINUX_DEFAULT='{default}'"
        assert run_piece(posix_sh, before, args) == after


def test_an_open_quote_and_an_unset_variable_are_left_as_they_are(posix_sh):
    before = "GRUB_CMDLINE_LINUX='a b=\"open iommu=soft'"
    assert run_piece(posix_sh, before, ("iommu=pt",))[0] == 'a b="open iommu=soft iommu=pt'
    before = "unset GRUB_CMDLINE_LINUX"
    assert run_piece(posix_sh, before, ("iommu=pt",)) == ["iommu=pt", ""]


OWN_GRUB = """GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=soft"
live=not an answer of ours
have=grubby
"""
UBUNTU, ROCKY = (TEXTS / "ubuntu.txt").read_text(), (TEXTS / "rocky.txt").read_text()


def parse(text: str) -> Iommu:
    return probe.parse({"iommu": Output(text, 0, nonce="n")}, Policy())


def result(observed: Iommu, check: str, **policy: Any) -> Result:
    return by_id(checks, observed, Policy(**policy))[check]


def plan(observed: Iommu, files: dict[str, bytes] | None = None) -> Any:
    return actions_of(step, observed, files=files)


def test_ubuntu_with_a_contradicting_argument_in_a_later_file():
    observed = parse(UBUNTU + exact("/etc/default/grub", OWN_GRUB, "n"))
    assert (observed.family, observed.cpus) == ("debian", 192)
    assert observed.tools == ("update-grub", "grub-mkconfig")
    assert observed.live[-1] == "quiet"
    assert observed.default_grub is not None
    assert b"live=not an answer" in observed.default_grub
    verdict = result(observed, "iommu.args")
    assert (verdict.fixable, verdict.expected) == (True, "iommu=pt")
    assert "iommu=soft contradicts" in verdict.actual
    assert verdict.source == "/etc/default/grub.d/50-cloud.cfg:1"
    write, run = plan(observed)
    assert write.path == "/etc/default/grub.d/zz-nodeready.cfg"
    assert write.content == grub_piece(("iommu=pt",))
    assert run == RunCommand(("update-grub",))


def test_rocky_with_variables_in_the_boot_loader_entries_on_an_intel_host():
    observed = parse(ROCKY)
    assert [entry.tokens[2:] for entry in observed.boot] == [("amd_iommu=off", "crashkernel=1G")]
    assert result(observed, "iommu.args").expected == "intel_iommu=on iommu=pt"
    assert plan(observed) == (
        RunCommand(("grubby", "--update-kernel=ALL", "--args=intel_iommu=on iommu=pt")),
    )
    off = result(observed, "iommu.off")
    assert (off.status, off.actual) == ("warn", "amd_iommu=off")
    assert off.source == "/boot/loader/entries/1-5.14.0-503.conf:5"


def test_a_node_without_amd_hardware_prints_nothing_and_everything_is_na():
    assert {r.status for r in judge_all(checks, parse(""), Policy())} == {"na"}


@pytest.mark.parametrize("case", cases(__file__, DATA, "wanted"))
def test_what_is_wanted_for_the_hardware(case):
    observed = Iommu(devices=tuple(case["devices"]), cpus=case["cpus"])
    policy = Policy(iommu_args=tuple(case["policy"])) if "policy" in case else Policy()
    wanted = case["wanted"]
    expected = tuple(wanted) if isinstance(wanted, list) else wanted
    assert checks.required_arguments(observed, policy) == expected


@pytest.mark.parametrize("cpus", ["0-", "many", "0-99999999999"])
def test_a_list_of_cpus_that_makes_no_sense(cpus):
    with pytest.raises(ProbeError):
        parse(f"device=0x74a1\nlive=ro\ncpus={cpus}\n")


def good(**changes: Any) -> Iommu:
    """An MI300X node on Debian whose next boot is right by hand-written configuration."""
    return dataclasses.replace(
        Iommu(
            devices=("0x74a1",),
            cpus=192,
            live=("ro", "iommu=pt"),
            boot=(Entry("/boot/grub/grub.cfg:5", ("ro", "iommu=pt")),),
            config=(Line("/etc/default/grub", 6, 'GRUB_CMDLINE_LINUX="iommu=pt"'),),
            family="debian",
            tools=("update-grub",),
        ),
        **changes,
    )


def drop_in(name: str, text: str, number: int = 1) -> Line:
    return Line(f"/etc/default/grub.d/{name}", number, text)


APPEND = 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=soft"'
SOFT = drop_in("99-x.cfg", APPEND)
SHELL = drop_in("99-x.cfg", "GRUB_CMDLINE_LINUX=$(cat /etc/args)")
OURS = drop_in("zz-nodeready.cfg", "nodeready_args=iommu=pt", 4)
LAST = drop_in("zz-nodeready.cfg", "GRUB_CMDLINE_LINUX=$nodeready_kept", 40)
WRONG = (Entry("/boot/grub/grub.cfg:5", ("ro",)),)
#: Lines of GRUB's configuration by the names of the cases.
LINES = {"GOOD": good().config[0], "SOFT": SOFT, "SHELL": SHELL, "OURS": OURS, "LAST": LAST}


@pytest.mark.parametrize("case", cases(__file__, DATA, "judged"))
def test_judged_and_planned(case):
    changes = as_tuples(case["change"])
    if "boot" in changes:
        changes["boot"] = tuple(Entry(*row) for row in changes["boot"])
    if "config" in changes:
        changes["config"] = tuple(LINES[name] for name in changes["config"])
    if "own_line" in changes:
        changes["own_line"] = LINES[changes["own_line"]]
    observed = good(**changes)
    verdict = result(observed, "iommu.args")
    assert (verdict.status, result(observed, "iommu.live").status) == (case["args"], case["live"])
    assert len(plan(observed)) == case["actions"]
    assert case.get("actual", "") in verdict.actual
    assert verdict.fix.startswith(case.get("fix", ""))
    assert not (verdict.fixable and "fix" in case)


def test_the_running_kernel_waits_for_a_reboot():
    verdict = result(good(live=("ro", "iommu=soft")), "iommu.live")
    assert verdict.actual.startswith("pending reboot: iommu=soft contradicts")
    assert (verdict.fix, verdict.owner) == ("reboot the node", "admin")


@pytest.mark.parametrize("case", cases(__file__, DATA, "off"))
def test_an_iommu_that_somebody_switched_off_is_reported_not_changed(case):
    observed = good(live=tuple(case["live"].split()))
    policy = {"iommu_args": tuple(case["policy"])} if "policy" in case else {}
    if "boot" in case:
        config = Line("/etc/default/grub", 9, f'GRUB_CMDLINE_LINUX="{case["boot"]}"')
        boot = Entry("/boot/grub/grub.cfg:5", ("iommu=pt", case["boot"]))
        observed = good(boot=(boot,), config=(config,))
    verdict = result(observed, "iommu.off", **policy)
    switched_off = case.get("actual", "the IOMMU is not switched off")
    assert (verdict.actual, verdict.source) == (switched_off, case.get("source", ""))
    assert (verdict.status, verdict.fixable) == ("warn" if "actual" in case else "ok", False)


def test_the_drop_in_sorts_behind_every_other_and_its_old_name_goes():
    observed = good(config=(OURS, LAST, drop_in("zzz-x.cfg", APPEND)), own_line=OURS)
    write, remove, _ = plan(observed, {OURS.path: b"old"})
    assert remove == RemoveFile(OURS.path, b"old")
    assert write.path.rpartition("/")[2] > "zzz-x.cfg"
    assert "nodeready" in write.path


def test_suse_has_a_block_at_the_end_that_costs_no_other_byte():
    raw = b'GRUB_DEFAULT=saved\r\nGRUB_CMDLINE_LINUX="a iommu=soft \xff"'
    changes = {"family": "suse", "tools": ("grub2-mkconfig",), "config": (SOFT,)}
    write, run = plan(good(boot=WRONG, default_grub=raw, **changes))
    assert isinstance(write, WriteFile)
    assert write.content.startswith(raw + b"\n# >>> nodeready")
    assert grub_piece(("iommu=pt",)) in write.content
    assert run == RunCommand(("grub2-mkconfig", "-o", "/boot/grub2/grub.cfg"))


def test_grubby_takes_contradictions_out_of_all_entries():
    boot = tuple(Entry("/a:1", tokens) for tokens in (("iommu=soft",), ("iommu=pt", "iommu=off")))
    for changes, removed in (
        ({"boot": boot}, "iommu=soft iommu=off"),
        ({"boot": WRONG, "entries": (Entry("/b:1", ("iommu=soft",)),)}, "iommu=soft"),
    ):
        (run,) = plan(good(**changes, family="redhat", tools=("grubby",)))
        assert run.argv[2:] == (f"--remove-args={removed}", "--args=iommu=pt")


def test_hostile_values_stay_data():
    hostile = '";reboot;\x1b[2J$(reboot)'
    words = f"x={hostile} iommu={hostile}"
    own = exact("/etc/default/grub", OWN_GRUB.replace("iommu=soft", words), "n")
    write, run = plan(parse(UBUNTU.replace("iommu=soft", words) + own))
    assert isinstance(write, WriteFile)
    assert hostile.encode() not in write.content
    assert run == RunCommand(("update-grub",))
    rocky = dataclasses.replace(parse(ROCKY), boot=(Entry("/a:1", (f"iommu={hostile}",)),))
    with pytest.raises(PlanError, match="remove it by hand"):
        plan(rocky)
