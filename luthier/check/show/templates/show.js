"use strict";
// The numbers behind the texts. All of them are put in as text, never as markup.
const segments = JSON.parse(document.getElementById("data").textContent);
const columns = ["index", "id", "name", "owner", "target", "weight", "segment", "position", "label"];
const MOST_RUNS = 24;
const placeOf = new WeakMap(); // element -> [segment, first token, number of tokens]

document.querySelectorAll(".segment").forEach((article, number) => {
  const sizes = segments[number].sizes && segments[number].sizes.filter((size) => size > 0);
  let place = 0;
  article.querySelectorAll(".text b, .text i").forEach((element, shown) => {
    const size = sizes ? sizes[shown] : 1;
    placeOf.set(element, [segments[number], place, size]);
    place += size;
  });
});

function numbersOf(segment, place) {
  const isTarget = segment.target[place] === "1";
  const next = place + 1 < segment.ids.length && segment.target[place + 1] === "1" ? segment.ids[place + 1] : null;
  const label = segment.labels ? segment.labels[place] : next;
  return {
    index: segment.first + place,
    id: segment.ids[place],
    name: segment.names[place],
    owner: segment.owners[segment.owner[place]],
    target: isTarget ? "yes" : "",
    weight: isTarget ? (segment.weights ? segment.weights[place] : 1) : "",
    segment: segment.segment,
    position: segment.positions ? segment.positions[place] : place,
    label: label === null ? "–" : label,
  };
}

const list = document.querySelector("#inspector dl");
let pinned = null;

// Runs of one value, "151655 ×50": the tokens of a picture are many, and most of them alike.
function runs(values) {
  const found = [];
  values.forEach((value) => {
    const last = found[found.length - 1];
    if (last && last.value === value) last.count += 1;
    else found.push({ value, count: 1 });
  });
  const words = found.slice(0, MOST_RUNS).map(({ value, count }) => (count > 1 ? `${value} ×${count}` : `${value}`));
  return words.join(" ") + (found.length > MOST_RUNS ? " …" : "");
}

function inspect(element) {
  const [segment, place, size] = placeOf.get(element);
  const numbers = numbersOf(segment, place);
  if (size > 1) {
    numbers.id = runs(segment.ids.slice(place, place + size));
    numbers.name = runs(segment.names.slice(place, place + size));
  }
  numbers.target = numbers.target || "only read";
  list.replaceChildren(...columns.filter((name) => numbers[name] !== "").map((name) => entry(name, numbers[name])));
}

function entry(name, value) {
  const row = document.createElement("div");
  const term = document.createElement("dt");
  const words = document.createElement("dd");
  term.textContent = name;
  words.textContent = value;
  words.className = name;
  row.append(term, words);
  return row;
}

// The token that was pointed at: of a media item, whatever of its box.
const shownAt = (event) => event.target.closest(".text b, .text i");

document.addEventListener("pointerover", (event) => {
  const element = shownAt(event);
  if (!pinned && placeOf.has(element)) inspect(element);
});

function pin(element) {
  if (pinned) pinned.classList.remove("pinned");
  pinned = element;
  if (pinned) pinned.classList.add("pinned");
}

document.addEventListener("click", (event) => {
  const element = shownAt(event);
  if (!placeOf.has(element)) return;
  pin(pinned === element ? null : element);
  inspect(element);
});

const tokens = [...document.querySelectorAll(".text b, .text i")];
const steps = { ArrowRight: 1, ArrowLeft: -1 };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") pin(null);
  if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey || event.target.closest(".scroll")) return;
  let next = pinned ? tokens.indexOf(pinned) + steps[event.key] : 0;
  while (next in tokens && !tokens[next].checkVisibility()) next += steps[event.key];
  if (!(next in tokens)) return;
  event.preventDefault();
  pin(tokens[next]);
  inspect(tokens[next]);
  tokens[next].scrollIntoView({ block: "nearest" });
});

const written = new WeakMap();
document.getElementById("spaces").addEventListener("change", (event) => {
  document.querySelectorAll(".text b, .text i:not(.item)").forEach((element) => {
    if (!written.has(element)) written.set(element, element.textContent);
    const text = written.get(element);
    element.textContent = event.target.checked ? text.replaceAll(" ", "·") : text;
  });
});

const numbers = document.getElementById("numbers");
numbers.addEventListener("toggle", () => {
  const body = numbers.querySelector("tbody");
  if (!numbers.open || body.childElementCount) return; // made once, and only if somebody looks
  segments.forEach((segment) => segment.ids.forEach((_, place) => {
    const row = body.insertRow();
    const values = numbersOf(segment, place);
    columns.forEach((name) => {
      const cell = row.insertCell();
      cell.textContent = values[name];
      if (name === "name" || name === "owner" || name === "target") cell.className = "l";
    });
  }));
});
