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
const texts = groups.map((group) => group.dataset.nodes.toLowerCase() + "\n"
  + [...group.querySelectorAll("code")].map((code) => code.textContent).join("\n").toLowerCase());
const fits = (at, word) => /^[0-9]+$/.test(word)
  ? holds(groups[at].dataset.ranks, Number(word)) : texts[at].includes(word);
const filter = () => {
  const words = find.value.toLowerCase().replace(/\branks?\s+(?=[0-9])/g, " ")
    .split(/\s+/).filter((word) => word);
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
