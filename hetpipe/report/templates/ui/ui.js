// Follows the server: it sends parts of the page again, as HTML that it has escaped, and these replace what has changed.
"use strict";

(() => {
  const line = document.getElementById("line");

  // A field that is being used stays as it is: what was typed into it, and what was marked, is set again.
  function replace(section, html) {
    const marked = new Set(Array.from(section.querySelectorAll("input:checked"), (box) => box.value));
    const { id, value } = section.contains(document.activeElement) ? document.activeElement : {};
    const focus = id === "find" ? null : focused(section);
    const find = section.querySelector("#find")?.value ?? "";
    const open = section.querySelector("details")?.open ?? false;
    const scrolled = Array.from(section.querySelectorAll(".scroll"), (box) => [box.scrollLeft, box.scrollTop]);
    section.innerHTML = html;
    for (const box of section.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(box.value);
    const field = section.querySelector("#find");
    if (field) field.value = find;
    if (id === "find" && field) {
      field.focus();
      field.setSelectionRange(value.length, value.length);
    }
    const details = section.querySelector("details");
    if (details) details.open = open;
    section.querySelectorAll(".scroll").forEach((box, index) => {
      [box.scrollLeft, box.scrollTop] = scrolled[index] ?? [0, 0];
    });
    if (focus) section.querySelector(focus)?.focus();
    filter();
  }

  function focused(section) {
    const element = document.activeElement;
    if (!section.contains(element)) return null;
    if (element.matches("input[type=checkbox]")) return `input[value="${CSS.escape(element.value)}"]`;
    if (element.matches("a")) return `a[href="${CSS.escape(element.getAttribute("href"))}"]`;
    return element.matches(".scroll") ? ".scroll" : null;
  }

  // Charts of the same lines take the new data, so that what is zoomed or hidden stays so.
  function update(section, html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const data = (root) => Array.from(root.querySelectorAll("figure.curves > script"), (one) => one.textContent);
    const before = Array.from(section.querySelectorAll("figure.curves"));
    const after = data(fresh.content);
    if (before.length && before.length === after.length && before.every((one, at) => one.accepts?.(after[at]))) {
      before.forEach((one, at) => one.update(after[at]));
      const lists = [section, fresh.content].map((root) => root.querySelector(".figures"));
      if (lists[0] && lists[1]) lists[0].replaceWith(lists[1]);
      return;
    }
    replace(section, html);
    window.drawCurves?.(section);
  }

  function filter() {
    const words = (document.getElementById("find")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("table.runs tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }

  document.addEventListener("input", (event) => event.target.id === "find" && filter());

  const address = line?.dataset.events;
  if (!address) return;
  const source = new EventSource(address);
  source.addEventListener("open", () => {
    line.textContent = "live";
    line.className = "";
  });
  source.addEventListener("error", () => {
    line.textContent = "the server does not answer; trying again";
    line.className = "lost";
  });
  source.addEventListener("parts", (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const section = document.getElementById(name);
      if (section) update(section, html);
    }
  });
  source.addEventListener("over", () => {
    source.close();
    line.textContent = "";
  });
})();
