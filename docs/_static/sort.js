/* Tables of results: a click on a column's head sorts the rows upwards, then downwards, then as
   they are written. A table of runs with their costs gets fields for budgets. */
"use strict";

const ORDERS = ["ascending", "descending", "none"];
const COSTS = ["images", "seconds", "MB up", "MB down", "MB memory", "MB disk"];

/** The number that a text begins with, or null: −1.2 for "−1.2 ± 0.3". */
function leadingNumber(text) {
  const found = /^[-+−]?(\d[\d,]*\d|\d)(\.\d+)?(e[-+]?\d+)?/.exec(text);
  return found && Number(found[0].replace("−", "-").replaceAll(",", ""));
}

/** The order of two texts: numbers before words. */
function compare(one, other) {
  const [a, b] = [leadingNumber(one), leadingNumber(other)];
  if (a !== null && b !== null) return a - b;
  return (a === null) - (b === null) || one.localeCompare(other);
}

/** Whether a cell holds no value; such rows are last in either direction. */
function missing(text) {
  return text === "" || text === "–";
}

/** The rows by the texts of one column; equal rows stay as they are written. */
function sorted(rows, column, order) {
  if (order === "none") return rows;
  const text = (row) => row.cells[column].textContent.trim();
  const sign = order === "ascending" ? 1 : -1;
  return [...rows].sort((one, other) => {
    const [a, b] = [text(one), text(other)];
    return missing(a) - missing(b) || sign * compare(a, b);
  });
}

/** The heads of a table become buttons that sort its rows. */
function makeSortable(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...(head.querySelector("p") ?? head).childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort") ?? "none";
      const order = ORDERS[(ORDERS.indexOf(before) + 1) % ORDERS.length];
      for (const each of heads) each.removeAttribute("aria-sort");
      if (order !== "none") head.setAttribute("aria-sort", order);
      body.append(...sorted(rows, column, order));
    });
  });
}

/** Above a table with all columns of costs: a field for each, which hides rows that cost more. */
function addBudgets(table) {
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
  if (!COSTS.every((cost) => heads.includes(cost))) return;
  const form = document.createElement("form");
  const fields = COSTS.map((cost) => {
    const label = document.createElement("label");
    const field = document.createElement("input");
    field.type = "number";
    label.append(`${cost} ≤ `, field);
    form.append(label);
    return { field, column: heads.indexOf(cost) };
  });
  form.className = "budgets";
  form.addEventListener("input", () => {
    for (const row of table.tBodies[0].rows) {
      row.hidden = fields.some(({ field, column }) =>
        field.value !== "" && leadingNumber(row.cells[column].textContent) > Number(field.value));
    }
  });
  table.before(form);
}

/** Classes for the style: the column that names the rows, kept in sight, and cells of long text. */
function markCells(table) {
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
  const column = Math.max(0, heads.indexOf("method"));
  for (const row of table.rows) {
    row.cells[column].classList.add("name");
    for (const cell of row.cells) cell.classList.toggle("wordy", cell.textContent.length > 40);
  }
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    addBudgets(table);
    markCells(table);
    if (table.tBodies[0].rows.length > 5) makeSortable(table);
  }
});
