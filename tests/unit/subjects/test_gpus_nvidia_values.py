"""One value of a healthy answer is another one: the verdict that an expert gives.

The answers are composed for many parts and drivers; recordings of real machines are read where
they lie beside the checkout. No word in the place of a value may make a node look healthier.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready.core.base import Output
from nodeready.core.result import Result
from nodeready.lab import nvidia as lab
from nodeready.subjects.gpus import facts, nvidia, nvidia_gpu
from tests import paths
from tests.builders import gpus as built
from tests.builders.gpus import ADDRESSES, PARTS, Node, bad, node, pci, trees_of, verdict_of
from tests.builders.verdicts import assert_says
from tests.cases import as_tuples, cases, read_table

#: Policy settings with which every check has something to judge.
ALL: Mapping[str, Any] = {"gpu_mig": "off", "gpu_idle": True}
HEALTHY = ("ok", "na")


def verdicts(node: Node, **policy: Any) -> dict[str, Result]:
    results = node.judged(**{**ALL, **policy})
    # The kernel's log is another module's, here it is empty.
    results.pop("kernel_faults")
    return results


def drivers_of(part: str) -> list[str]:
    return [driver for name, driver in built.combinations() if name == part]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("part", PARTS)
def test_a_healthy_node_of_each_part_is_well(part, every):
    """With the first driver for it, and the last; or with every one."""
    drivers = drivers_of(part)
    for driver in drivers if every else drivers[:: len(drivers) - 1 or 1]:
        results = verdicts(node(part, driver), gpu_count=PARTS[part].count)
        assert bad(results) == {}, driver
        # What stands there is read, and not only left alone.
        for check in ("present", "tool", "model", "throttle", "persistence"):
            assert results[check].status == "ok", (driver, check)


H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
GB200, GB300, RUBIN = "NVIDIA GB200", "NVIDIA GB300", "NVIDIA Graphics Device"
V100, T4, L40S = "Tesla V100-SXM2-32GB", "Tesla T4", "NVIDIA L40S"
NAMES = {"H100": H100, "A100": A100, "B200": B200, "GB200": GB200, "GB300": GB300,
         "Rubin": RUBIN, "V100": V100, "T4": T4, "L40S": L40S, "A2": "NVIDIA A2"}  # fmt: skip
LATEST = "580.105.08"
#: Which of the node's GPUs differs.
AT = 1


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{name}/")
        else:
            yield f"{above}{name}"


def put(tree: dict[str, Any], path: str, value: str | None) -> None:
    """This text at the path; None: no such element."""
    *above, last = path.split("/")
    for name in above:
        tree = tree[name]
    if value is None:
        del tree[last]
    else:
        assert last in tree, path
        tree[last] = value


def mutated(part: str, driver: str, path: str, value: str | None, count: int = 8) -> Node:
    trees = trees_of(part, driver)[:count]
    put(trees[AT], path, value)
    return node(part, driver, trees)


def everywhere(part: str, driver: str, path: str, value: str | None) -> Node:
    """The node with two GPUs that both have this text at the path."""
    trees = trees_of(part, driver)[:2]
    for tree in trees:
        put(tree, path, value)
    return node(part, driver, trees)


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/nvidia_values.json"))
def test_one_value_that_differs(case):
    """The name of a row is PART DRIVER: the end of an element's path=text; others."""
    form, _, values = case["name"].partition(": ")
    part, major = form.split()
    driver = next(driver for driver in built.DRIVERS if driver.startswith(f"{major}."))
    trees = trees_of(NAMES[part], driver)
    for value in values.split("; "):
        end, equals, text = value.partition("=")
        matches = [path for path in leaves(trees[AT]) if f"/{path}".endswith(f"/{end}")]
        assert not equals or len(matches) == 1, matches
        if equals:
            put(trees[AT], matches[0], text)
    results = verdicts(node(NAMES[part], driver, trees), **as_tuples(case.get("policy", {})))
    assert bad(results).keys() == case["wrong"].keys()
    for check, verdict in case["wrong"].items():
        result = results[check]
        assert_says(result, verdict)
        assert f"gpu {AT} ({ADDRESSES[AT]}): " in result.actual
        assert result.fix or result.status == "unknown" or check == "model"


#: What stands in the place of a value that the tool cannot tell.
ERRORS = read_table(__file__, "ERRORS")
NONE = ("N/A", "[N/A]", "Not Supported", "[Not Supported]")

#: Paths below `<gpu>`: elements, by the check that rests on them; whole parts of the answer, which
#: then have no elements; what each answer shows; numbers that an element cannot have.
ELEMENTS, WHOLE, CORE, IMPLAUSIBLE = json.loads(
    (Path(__file__).parent / "data" / "gpus" / "nvidia_elements.json").read_text()
).values()
READ = {path: check for check, elements in ELEMENTS.items() for path in elements}
#: A part and a driver of each form of the answer.
FORMS = (
    (V100, "450.80.02"), (T4, "515.105.01"), (A100, "535.183.06"), (H100, "550.163.01"),
    (H100, "575.57.08"), (H100, LATEST), (GB300, "595.58.03"), (RUBIN, "615.23"),
)  # fmt: skip
in_each_form = pytest.mark.parametrize(
    ("part", "driver"),
    [
        pytest.param(*form, id=form[1], marks=[pytest.mark.nightly] * (index in {1, 3, 4, 6}))
        for index, form in enumerate(FORMS)
    ],
)

#: What a GPU must have, what is a process's, and what each answer shows.
NEEDED = ("product_name", "uuid", "pci/pci_bus_id")
JOBS = ("processes", "accounted_processes")


@pytest.mark.parametrize("count", [11, pytest.param(1, marks=pytest.mark.nightly)])
@in_each_form
def test_an_error_in_the_place_of_a_value_is_unknown(part, driver, count):
    """In each place one word of `count`, so that all places have all words when it is 1."""
    present = [*leaves(trees_of(part, driver)[0])]
    tried = 0
    for path, check in {**READ, **WHOLE}.items():
        parts = any(leaf.startswith(f"{path}/") for leaf in present)
        for word in ERRORS if path in present or (path in WHOLE and parts) else ():
            tried += 1
            # Without a process, that element is empty; what went wrong at the fabric is any text.
            if tried % count or (path, word) in (("processes", ""), ("fabric/status", "-")):
                continue
            results = verdicts(mutated(part, driver, path, word, 2))
            assert results[check].status not in HEALTHY, (path, word, results[check].actual)
    assert tried > 300


@in_each_form
def test_an_error_in_any_other_place_is_seen_and_hides_no_other_gpu(part, driver):
    for index, path in enumerate(leaves(trees_of(part, driver)[0])):
        if path not in JOBS:
            word = ("Unknown Error", "ERR!")[index % 2]
            trees = trees_of(part, driver)[:2]
            put(trees[AT], path, word)
            assert bad(verdicts(node(part, driver, trees))), (path, word)
            reason = next(name for name in leaves(trees[0]) if name.endswith("_hw_slowdown"))
            put(trees[0], reason, "Active")
            assert verdicts(node(part, driver, trees))["throttle"].status == "fail", (path, word)


@in_each_form
def test_a_value_that_the_device_does_not_have_is_no_fault(part, driver):
    # Of all GPUs: one that lacks what its peers have is unknown.
    for index, path in enumerate(leaves(trees_of(part, driver)[0])):
        if path not in NEEDED:
            word = ("N/A", "[Not Supported]")[index % 2]
            assert bad(verdicts(everywhere(part, driver, path, word))) == {}, (path, word)


@in_each_form
def test_a_value_that_each_answer_of_such_a_driver_has_is_missed(part, driver):
    later = {535: ("fabric", "fabric/state"), 515: ("remapped_rows",)}
    since = [path for major, more in later.items() for path in more if int(driver[:3]) >= major]
    for path in (*CORE, *since):
        check = {**READ, **WHOLE}[path]
        results = verdicts(everywhere(part, driver, path, None))
        assert results[check].status == "unknown", (path, results[check].actual)


def test_a_value_of_another_name_is_not_missed():
    margin = everywhere(H100, LATEST, "temperature/gpu_temp_tlimit", None)
    assert verdict_of(verdicts(margin), "temperature")[0] == "unknown"
    # Between 570 and 575 both stand there, and the old one says that it is no more.
    results = verdicts(node(H100, "575.57.08"))
    assert verdict_of(results, "recovery") == ("ok", "none")
    gone = mutated(H100, "575.57.08", "gpu_recovery_action", None)
    assert verdict_of(verdicts(gone), "recovery")[0] == "unknown"
    # The name that replaces driver_version.
    text = node(RUBIN, "615.23").smi.text.replace("driver_version>", "other>")
    variant = replace(node(RUBIN, "615.23"), smi=Output(text, 0))
    assert verdict_of(verdicts(variant), "tool") == ("ok", "nvidia-smi 615.23")


@pytest.mark.parametrize("name", [*ERRORS, *NONE, None])
def test_a_gpu_without_a_readable_name_is_not_skipped(name):
    variant = mutated(H100, LATEST, "product_name", name)
    assert verdict_of(verdicts(variant), "model")[0] == "unknown"
    # Nor is what is wrong with it, or what it does not say.
    text = variant.smi.text
    start = text.index(f'<gpu id="0000{ADDRESSES[AT].upper()}">')
    sick = text[:start] + text[start:].replace("<gpu_temp>31 C", "<gpu_temp>N/A", 1)
    results = verdicts(replace(variant, smi=Output(sick, 0)))
    assert verdict_of(results, "temperature")[0] == "unknown"
    sick = text[:start] + text[start:].replace("row_pending>No", "row_pending>Yes", 1)
    results = verdicts(replace(variant, smi=Output(sick, 0)))
    assert verdict_of(results, "remapped_rows")[0] == "fail"


@pytest.mark.parametrize(("text", "value"), [
    ("31 C", 31), ("31", 31), ("31C", 31), ("-2 C", -2), ("16x", 16), ("2560 bank(s)", 2560),
    ("700.00 W", 700), ("0", 0),
    ("31 F", None), ("31 C?", None), ("0 Unknown Error", None), ("0x10", None), ("1e3", None),
    ("--", None), ("9" * 5000, None), ("٣١ C", None), ("None", None),
])  # fmt: skip
def test_a_number_is_one_or_it_is_unknown(text, value):
    assert nvidia_gpu.number(text) == value


@pytest.mark.parametrize(
    ("part", "driver"), [(V100, "450.80.02"), (A100, "535.183.06"), (H100, LATEST)]
)
def test_a_number_that_a_value_cannot_be_is_unknown(part, driver):
    present, tried, healthy = [*leaves(trees_of(part, driver)[0])], 0, []
    for path, numbers, check in IMPLAUSIBLE:
        for text in numbers if path in present else ():
            for make in (mutated, everywhere):
                if verdicts(make(part, driver, path, text))[check].status != "unknown":
                    healthy.append((make.__name__, path, text))
                tried += 1
    assert healthy == []
    assert tried > 40


@pytest.mark.parametrize("text", ["-1", "4294967295", "257", "Unknown Error", "ERR!", "", "x"])
def test_a_number_of_gpus_that_is_none_is_unknown(text):
    variant = node(H100, LATEST)
    shown = re.sub("(<attached_gpus>)[^<]*", rf"\g<1>{text}", variant.smi.text)
    results = verdicts(replace(variant, smi=Output(shown, 0)))
    assert verdict_of(results, "tool")[0] == "unknown"


PROCESS_NAMES = [*read_table(__file__, "PROCESS_NAMES"), "x" * 5000]


@pytest.mark.parametrize("name", PROCESS_NAMES, ids=range(len(PROCESS_NAMES)))
def test_a_process_cannot_change_a_verdict_by_its_name(name):
    def results(words: str) -> dict[str, tuple[str, str]]:
        trees = trees_of(H100, LATEST)[:3]
        trees[AT]["processes"] = (
            "<process_info><gpu_instance_id>N/A</gpu_instance_id>\n<pid>77</pid>\n<type>C</type>\n"
            f"<process_name>{words}</process_name>\n<used_memory>5 MiB</used_memory>\n"
            "</process_info>\n"
        )
        trees[2]["remapped_rows"]["remapped_row_pending"] = "Yes"
        judged = node(H100, LATEST, trees).judged()
        processes = node(H100, LATEST, trees).observed().nvidia[AT].processes
        assert {process.pid for process in processes} <= {77}
        return {check: (result.status, result.actual) for check, result in judged.items()}

    assert results(name) == results("python")
    assert results(name)["remapped_rows"][0] == "fail"


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/links_down.json"))
def test_links_that_are_down(case):
    """The name of a row is PART: links that are down. Cards: a bridge has four links, and an NVL
    is a pair. With and without switches to be seen (NVLink 5 has none: gpu-operator, issue 2781),
    and where the fabric's state is not told (a guest).
    """
    part = case["name"].partition(": ")[0]
    driver = drivers_of(part)[-1]
    places = ADDRESSES[: PARTS[part].count]
    bus = built.VERSION + "".join(pci(place, device=f"0x{PARTS[part].device}") for place in places)
    text = re.sub("(<stat(e|us)>)(Completed|Success)", r"\1N/A", node(part, driver).smi.text)
    down = {int(gpu): range(*ends) for gpu, ends in case["down"].items()}
    links = Output("nr_scanned=1\n" + built.nvlinks(PARTS[part], down), 0)
    for more in ({}, {"bus": bus + built.DEVICES, "smi": Output(text, 0)}):
        result = verdicts(replace(node(part, driver), links=links, **more))["nvlink"]
        assert_says(result, case["verdict"])


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/links.json"))
def test_the_state_of_a_link(case):
    variant = node(B200, LATEST)
    lines = variant.links.text.split("\n")
    at = lines.index(next(line for line in lines if lab.uuid(1) in line)) + 3
    lines[at] = f"\t Link 2: {case['name']}"
    result = verdicts(replace(variant, links=Output("\n".join(lines), 0)))["nvlink"]
    assert_says(result, case["verdict"])


def test_links_that_are_all_slow_or_of_which_nothing_is_told():
    variant = node(H100, LATEST)
    slow = variant.links.text.replace("26.562", "25")
    result = verdicts(replace(variant, links=Output(slow, 0)))["nvlink"]
    assert (result.status, result.actual) == ("fail", "gpus 0-7: link 0 at 25 of 26.562 GB/s")
    # One GPU has an error, or is left out.
    lines = rf"GPU 1: .*{lab.uuid(1)}\)(\n\s+Link.*)+\n"
    for words in ("", f"GPU 1: x (UUID: {lab.uuid(1)})\n\t NVML: GPU is lost\n"):
        text = re.sub(lines, lambda match, words=words: words, variant.links.text)
        result = verdicts(replace(variant, links=Output(text, 0)))["nvlink"]
        assert (result.status, result.actual[:6]) == ("unknown", "gpu 1 "), result.actual


@pytest.mark.parametrize("text", ["", "nr_scanned=1\n", built.PREFIX])
def test_an_empty_answer_on_links_is_that_of_a_card_without_them(text):
    for part in ("NVIDIA A10", "NVIDIA A10G", L40S):
        variant = replace(node(part, "525.147.05"), links=Output(text, 0))
        assert verdict_of(verdicts(variant), "nvlink") == ("na", "these GPUs use no links")
    for part in (H100, B200):
        variant = replace(node(part, LATEST), links=Output(text, 0))
        assert verdict_of(verdicts(variant), "nvlink")[0] == "unknown"


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/aer.json"))
def test_uncorrected_errors_of_a_link(case):
    """The name of a row is the file, and its lines."""
    file, _, lines = case["name"].partition(":")
    path = f"/sys/bus/pci/devices/{ADDRESSES[AT]}/{file}"
    variant = node(H100, LATEST)
    bus = "\n".join([variant.bus, *(f"{path}:{line}" for line in lines.split(";")), ""])
    result = verdicts(replace(variant, bus=bus))["pcie"]
    assert_says(result, case["verdict"])
    # And where the tool does not answer.
    silent = replace(variant, bus=bus, smi=Output("", None))
    status = "unknown" if result.status == "ok" else result.status
    assert verdicts(silent)["pcie"].status == status


def test_cliques_are_compared_between_nodes():
    present = facts.compared(node(GB300, "595.58.03").observed())
    assert present["fabric_clique"] == "32766 of 00000001-0000-0000-0000-000000000001"
    assert "fabric_clique" not in facts.compared(node(L40S, "595.58.03").observed())


SAMPLES = paths.SAMPLES / "nvidia-smi"
RECORDED = sorted(SAMPLES.glob("*.xml")) if SAMPLES.is_dir() else []


def recorded(text: str) -> Node:
    """A node with this answer, and the bus and links that fit it."""
    gpus = nvidia.parse(Output(text, 0)).gpus
    bus = built.VERSION + "".join(pci(gpu.pci_address, width=gpu.pcie_width or 16) for gpu in gpus)
    lines = []
    for gpu in gpus:
        part = PARTS.get(gpu.model or "", PARTS[T4])
        lines.append(f"GPU {gpu.index}: {gpu.model} (UUID: {gpu.uuid})")
        active = 0 if gpu.mig == "on" or part.links is None else part.links[0]
        lines += [f"\t Link {n}: {part.gbps} GB/s" for n in range(active)]
    links = Output("\n".join(["nr_scanned=1", *lines]) + "\n", 0)
    return Node(bus + built.DEVICES, smi=Output(built.PREFIX + text, 0), links=links)


@pytest.mark.skipif(not RECORDED, reason="no recorded samples beside the checkout")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_answers_are_judged_as_their_machines_are(path):
    # Some of these machines have no persistence mode; one has MIG.
    results = recorded(path.read_text()).judged(gpu_persistence="any")
    results.pop("kernel_faults")
    degraded = {"fabric_manager": "gpu 1 (0000:0b:00.0): fabric unhealthy, route unhealthy"}
    assert bad(results) == (degraded if path.name == "gb200-fabric-degraded.xml" else {})


@pytest.mark.parametrize("word", ["Unknown Error", "[GPU is lost]", "GPU requires reset", ""])
def test_a_whole_gpu_that_is_an_error(word):
    text = node(H100, LATEST).smi.text
    start = text.index(">", text.index(f'<gpu id="0000{ADDRESSES[AT].upper()}">')) + 1
    shown = text[:start] + word + text[text.index("</gpu>", start) :]
    results = verdicts(replace(node(H100, LATEST), smi=Output(shown, 0)))
    observed = {*READ.values()} - {"retired_pages", "nvlink", "tool", "device_access"}
    assert {name for name in observed if results[name].status in HEALTHY} == set()
    assert (results["recovery"].status == "fail") is ("lost" in word or "reset" in word)


_VALUES = (
    *("31 C", "-5 C", "200 C", "0 C", "N/A", "[N/A]", "Unknown Error", "", "99999 MiB", "12.5 W"),
    *("GPU is lost", "4294967295", "-1", "2 C</gpu_temp><gpu_temp>3 C", "&amp;", "<x/>", "1 C\n"),
    *("</gpu><gpu id='0'>", "GPU-00000000-0000-0000-0000-000000000001", "1650522003999", "Yes"),
)
_PROCESS = (
    "<process_info><pid>{}</pid><type>C</type><process_name>{}</process_name>"
    "<used_memory>9 MiB</used_memory></process_info>"
)


def test_a_gpu_that_differs_in_what_varies_is_read_by_its_lines():
    text = node(H100, LATEST).smi.text
    other = {"gpu_temp": "40 C", "gpu_temp_tlimit": "20 C", "serial": "16505", "used": "99 MiB",
             "uuid": "GPU-00000000-0000-0000-0000-000000000001", "processes":
             "<process_info><pid>x</pid><type>C</type></process_info>"}  # fmt: skip
    for element, value in other.items():
        nvidia._parse_blocks(text)
        changed = re.sub(rf"(<{element}>)[^<]*", rf"\g<1>{value}", text, count=1)
        assert changed != text
        whole = None if element == "processes" else nvidia._parse_whole(changed)
        assert nvidia._parse_blocks(changed) == whole


@pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.nightly)])
def test_what_the_lines_tell_is_what_the_whole_xml_tells(examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def each(data: st.DataObject) -> None:
        text = node(*data.draw(st.sampled_from(list(built.combinations())))).smi.text
        nvidia._parse_blocks(text)
        for _ in range(data.draw(st.integers(1, 6))):
            lines = text.split("\n")
            at = data.draw(st.integers(0, len(lines) - 1))
            leaf = re.fullmatch(r"(\s*<(\w+)>)[^<]*(</\2>)", lines[at])
            step = data.draw(
                st.sampled_from(("value", "value", "value", "drop", "twice", "process"))
            )
            if step == "value" and leaf:
                lines[at] = f"{leaf[1]}{data.draw(st.sampled_from(_VALUES))}{leaf[3]}"
            elif step == "drop":
                del lines[at]
            elif step == "twice":
                lines.insert(at, lines[at])
            text = "\n".join(lines)
            if step == "process":
                named = st.sampled_from(("python", "a<b", "</process_name>", "&", "x</gpu>"))
                inside = _PROCESS.format(
                    data.draw(st.sampled_from(("7", "", "x"))), data.draw(named)
                )
                text = text.replace("<processes>", f"<processes>{inside}", 1)
            by_lines = nvidia._parse_blocks(text)
            assert by_lines is None or by_lines == nvidia._parse_whole(text)

    each()
