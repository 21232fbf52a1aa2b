"""What the page of stacks looks like and how it searches: its style sheet and its script.

Both are constant, so that the page's Content-Security-Policy names their digests: a text from a
node that became a style or a script in spite of everything would not be obeyed.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2330; --soft: #5a6577; --page: #fbfbfd; --card: #fff; --line: #dfe3ea;
  --bad: #b3261e; --warn: #8a5a00; --fine: #1b6e3c; --odd: #7b2d8e; --link: #1a56b0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ef; --soft: #9aa5b5; --page: #12151b; --card: #1a1f28; --line: #323a47;
    --bad: #ff8a80; --warn: #f0bd5b; --fine: #7fd49b; --odd: #d9a0e8; --link: #8ab8ff;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
code, .mono, .frames, #find { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
a { color: var(--link); }
.soft { color: var(--soft); }
[hidden] { display: none !important; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: 3px; }
#search { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .6rem;
  align-items: center; padding: .6rem 0; margin-top: 1rem; background: var(--page); }
#find { flex: 1 1 16rem; padding: .45rem .6rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; }
button { font: inherit; padding: .35rem .7rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; cursor: pointer; }
.group { margin: .5rem 0; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--tone, var(--line)); border-radius: 6px; }
.group > summary { display: grid; gap: 0 1rem; padding: .55rem .8rem; cursor: pointer;
  grid-template-columns: .6rem 6.5rem minmax(8rem, 14rem) minmax(7rem, 14rem) 1fr;
  list-style: none; overflow-wrap: anywhere; }
.group > summary::before { content: "\\25b8"; color: var(--soft); }
.group[open] > summary::before { content: "\\25be"; }
.group > summary::-webkit-details-marker { display: none; }
.group > summary b { color: var(--tone, inherit); }
.group > div { padding: 0 .8rem .3rem 2.4rem; }
.missing, .dead, .no-data, .uninterruptible, .stopped { --tone: var(--bad); }
.blocked, .spinning { --tone: var(--warn); }
.progressing { --tone: var(--fine); }
.traced { --tone: var(--odd); }
.frames { margin: .5rem 0; padding: 0; list-style: none; overflow-x: auto; }
.frames li { white-space: pre; }
.frames .apart { color: var(--warn); font-weight: 600; }
.why, .hint { padding-left: .7rem; border-left: 3px solid var(--line); }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
.inner summary { color: var(--soft); cursor: pointer; }
.wide { overflow-x: auto; }
#tree ul { margin: 0; padding-left: 1.4rem; list-style: none; }
#tree > ul { padding-left: 0; }
#tree li { border-left: 1px solid var(--line); padding-left: .6rem; overflow-wrap: anywhere; }
#tree .count { display: inline-block; min-width: 3.5rem; text-align: right; margin-right: .7rem;
  font-weight: 600; font-variant-numeric: tabular-nums; }
@media (max-width: 48rem) {
  .group > summary { grid-template-columns: .6rem 6.5rem 1fr; }
  .group > summary > :nth-child(n + 3) { grid-column: 3; }
}
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; }
  #search { display: none; }
  .group { break-inside: avoid; }
  details::details-content { content-visibility: visible; }
}
"""

SCRIPT = """
"use strict";
const find = document.getElementById("find");
const said = document.getElementById("said");
const groups = [...document.querySelectorAll(".group")];
const branches = [...document.querySelectorAll("#tree li[data-groups]")];
const folds = [...document.querySelectorAll("details")];
const holds = (ranks, number) => ranks.split(",").some((part) => {
  const [ends, step] = part.split("/");
  const [first, last] = ends.split("-").map(Number);
  return ends !== "" && number >= first && number <= (last === undefined ? first : last)
    && (number - first) % (Number(step) || 1) === 0;
});
const texts = groups.map((group) => group.dataset.nodes.toLowerCase() + "\\n"
  + [...group.querySelectorAll("code")].map((code) => code.textContent).join("\\n").toLowerCase());
const fits = (at, word) => /^[0-9]+$/.test(word)
  ? holds(groups[at].dataset.ranks, Number(word)) : texts[at].includes(word);
const filter = () => {
  const words = find.value.toLowerCase().replace(/\\branks?\\s+(?=[0-9])/g, " ")
    .split(/\\s+/).filter((word) => word);
  const shown = new Set();
  groups.forEach((group, at) => {
    const on = words.every((word) => fits(at, word));
    group.hidden = !on;
    if (on) shown.add(String(at));
  });
  branches.forEach((branch) => {
    branch.hidden = words.length > 0
      && !branch.dataset.groups.split(" ").some((at) => shown.has(at));
  });
  said.textContent = words.length ? shown.size + " of " + groups.length + " groups" : "";
};
find.addEventListener("input", filter);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== find) {
    event.preventDefault();
    find.focus();
  } else if (event.key === "Escape" && document.activeElement === find) {
    find.value = "";
    filter();
  }
});
const fold = (open) => folds.forEach((one) => { one.open = open; });
document.getElementById("open").addEventListener("click", () => fold(true));
document.getElementById("close").addEventListener("click", () => fold(false));
let before = [];
window.addEventListener("beforeprint", () => {
  before = folds.map((one) => one.open);
  fold(true);
});
window.addEventListener("afterprint", () => {
  folds.forEach((one, at) => { one.open = before[at]; });
});
document.getElementById("search").hidden = false;
filter();
"""
