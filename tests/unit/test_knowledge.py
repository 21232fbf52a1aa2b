"""The tables of nodeready/knowledge: each row is held against its own examples."""

from __future__ import annotations

import re

import pytest

from nodeready import knowledge
from nodeready.agent import log_ranks, log_variables, payload
from nodeready.agent.failures import rules as failure_rules
from nodeready.agent.witnesses import kernel_log, motion, nccl_errors, progress
from nodeready.runs.audit import measures
from nodeready.runs.ready import batch_script
from nodeready.runs.stacks import hints
from nodeready.subjects.environment_rules import RankEnvironment, judge
from nodeready.subjects.environment_table import BAD_VALUES, EnvironmentFacts, HcaPort
from nodeready.subjects.gpus import xids
from nodeready.subjects.ssh_client import checks
from tests.paths import PACKAGE


def _nccl_error(line):
    error = nccl_errors.meaning(line)
    return error and error.key


def _failure(line):
    """The row of a line without a traceback, or of an exception's text."""
    is_indented = line[:1].isspace() and not line[1:2].isalpha()  # Fortran begins with one blank.
    rows = failure_rules.INDENTED_ROWS if is_indented else failure_rules.LINE_ROWS
    found = failure_rules.find_row(rows, line)
    return found[0].key if found else failure_rules.explain(line)[0]


def _phrase(line):
    keys = knowledge.read("failure_phrases")
    return tuple(key for key in keys if failure_rules.PHRASES[key].search(line))


def _login_failure(messages):
    return checks.cause_of(messages)[0]


def _xid(line):
    for _, code in kernel_log.xids([(0.0, line)]):
        if xids.action_of(code, line) == xids.lookup(code).action:
            return str(code)
    return None


def _driver_message(line):
    rule = xids.find_rule(line)
    return rule and rule.key


def _kernel_line(line):
    """The rows of one kind have one meaning, so that one line may be of two rows."""
    message = kernel_log.message_of(line, 0)
    keys = [key for key, row in KERNEL.items() if re.match(row["pattern"], line)]
    kinds = [kind for key in keys[:1] if (kind := KERNEL[key]["kind"])]
    assert kinds == ([message.kind] if message else [])
    return keys[0] if keys else None


KERNEL = knowledge.read("kernel_lines")


def test_a_kernels_line_that_begins_with_a_process_is_of_the_first_rows_or_of_none():
    """Its name is 15 bytes of the user's choice: the longest beginning of each example."""
    of_processes = {key for key, row in KERNEL.items() if row.get("names_process")}
    tails = (
        "[4711]: segfault at 0",
        ": page allocation failure: order:5",
        "[4711]: bad frame in rt",
    )
    for row in KERNEL.values():
        for example in row["matches"]:
            for tail in tails:
                assert _kernel_line(example[:15] + tail) in {*of_processes, None}
            for tail in (": vmalloc error: size 1", " invoked oom-killer: gfp_mask=0xcc0"):
                assert _kernel_line(example[:15] + tail) == "of-a-process"


def _launcher(line):
    # A column of unknown words is the weakest.
    forms = sorted(log_ranks.FORMS, key=lambda form: form.learned == "words")
    found = (f for f in forms if (f.pattern.search if f.is_inside else f.pattern.match)(line))
    return next((form.name for form in found), None)


def _environment_value(example):
    """example: ``NAME=VALUE`` of variables, and of what is known about the node"""
    words = dict(word.split("=", 1) for word in example.split())
    variables = {name: value for name, value in words.items() if name.isupper()}
    facts = {name: value for name, value in words.items() if name.islower()}
    ports = (HcaPort("mlx5_0", 1, facts.pop("port", "down")),)
    nccl = facts.pop("nccl", "")
    observed = {"gpu1": EnvironmentFacts(hca_ports=ports, **facts)}
    findings = judge([RankEnvironment("gpu1", variables)], observed, nccl=nccl)
    said = [(f.variable, f.problem, f.source) for f in findings if f.rule == "value"]
    keys = [v.key for v in BAD_VALUES if (v.variable, v.problem, v.source) in said]
    return ", ".join(keys)


def _job_end(line):
    ends = zip(knowledge.read("job_ends"), log_variables.ENDS, strict=True)
    return next((key for key, end in ends if log_variables.ends_well(line, [end])), None)


def _measure(line):
    patterns = zip(knowledge.read("measures"), measures._PATTERNS, strict=True)
    return next((key for key, pattern in patterns if pattern.match(line.encode())), None)


#: table -> what finds the key of the row that explains a line.
ENGINES = {
    "nccl_errors": _nccl_error,
    "failures": _failure,
    "launcher_reports": _failure,
    "login_failures": _login_failure,
    "xids": _xid,
    "job_ends": _job_end,
    "driver_messages": _driver_message,
    "kernel_lines": _kernel_line,
    "environment_values": _environment_value,
    "launchers": _launcher,
    "failure_phrases": _phrase,
    "error_kinds": failure_rules.key_of_words,
    "progress": progress.row_of,
    "roles": lambda line: hints.role_of(line) or None,
    "measures": _measure,
    "job_timeouts": lambda line: ", ".join(motion.timeouts(line)) or None,
    "batch_scripts": lambda script: ", ".join(f.rule for f in batch_script.check(script)) or None,
}
#: Fields that find a row; a row without them is known by its key. Of the Xids, each has a line.
WORDS = {"needles", "pattern", "values", "nccl", "cuda", "value"}
#: Tables without examples; hints.json, wrong_environments.json, test_waits.py and
#: test_descendants.py have their cases.
OTHERS = {"hints", "environment_rules", "reporters", "system_calls", "descendants"}
ROWS = [
    pytest.param(table, key, row, id=f"{table}-{key}")
    for table in ENGINES
    for key, row in knowledge.read(table).items()
    if isinstance(row, dict)
]


def test_every_table_has_an_engine():
    assert {path.stem for path in (PACKAGE / "knowledge").glob("*.toml")} == {*ENGINES, *OTHERS}


@pytest.mark.parametrize(("table", "key", "row"), ROWS)
def test_a_row_explains_its_examples_alone(table, key, row):
    assert row["source"]
    for examples in ("matches", "not_matches"):
        assert row.get(examples) or not (table == "xids" or WORDS.intersection(row)), (
            f"the row has no {examples}"
        )
    explained = [ENGINES[table](line) for line in row.get("matches", ())]
    # A line may have several phrases.
    assert all(key in keys if table == "failure_phrases" else keys == key for keys in explained)
    others = [ENGINES[table](line) or "" for line in row.get("not_matches", ())]
    assert all(key not in keys if table == "failure_phrases" else keys != key for keys in others)


def test_the_quick_filter_of_lines_passes_every_example():
    rows = [*knowledge.read("failures").values(), *knowledge.read("launcher_reports").values()]
    failures = [row for row in rows if isinstance(row, dict) and row["role"] != failure_rules.NOTE]
    lines = [line for row in failures for line in row["matches"]]
    assert [line for line in lines if not failure_rules.has_needle(line)] == []


def test_a_node_gets_the_tables_of_its_program_without_examples():
    sources = payload.closure(["nodeready.agent.witnesses.nccl_errors"])
    carried = {}
    exec(sources[knowledge.COMPILED], carried)
    assert carried["TABLES"] == {"nccl_errors": knowledge.rows("nccl_errors")}
    assert "matches" not in sources[knowledge.COMPILED]
    (without,) = (payload.closure(["nodeready.core.text"])[knowledge.COMPILED],)
    assert without.endswith("TABLES = {}\n")
