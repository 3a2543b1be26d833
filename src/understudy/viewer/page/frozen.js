// The answers of a report: the same questions as the server's, from the data in the page.

const PAGE = 50;
const LABELS = ["kind", "source", "teacher", "stop_reason", "origin"];
const RANGES = ["step", "reward", "kl"];

// As on the server, a row without the number is in no range of it; null <= 1 would be true.
function within(value, low, high) {
  return (!low && !high) || (value !== null && (!low || value >= Number(low)) && (!high || value <= Number(high)));
}

function selected(rows, asked) {
  const text = (asked.q ?? "").toLowerCase();
  const kept = rows.filter((row) => LABELS.every((name) => !asked[name] || row[name] === asked[name])
    && RANGES.every((name) => within(row[name], asked[`${name}_min`], asked[`${name}_max`]))
    && (!text || `${row.prompt}\n${row.completion}`.toLowerCase().includes(text)));
  const sign = asked.desc === "0" ? 1 : -1;
  const value = (row) => row[asked.sort ?? "step"] ?? -Infinity * -sign;  // unknown values come last
  return kept.sort((a, b) => sign * (value(a) - value(b)) || 0);
}

function resampled(counts, window, from, to) {
  const width = (window.to - window.from) / counts.length || 1;
  return counts.map((_, i) => counts[Math.floor((from + ((to - from) * (i + 0.5)) / counts.length - window.from) / width)] ?? 0);
}

export function frozenAnswers(data) {
  const rows = data.rows.map((one) => one.summary);
  const byId = new Map(data.rows.map((one) => [one.summary.id, one]));
  const shown = (id) => {
    if (!byId.has(id)) throw new Error("this row is not in the report; `understudy view` on the run has all of them");
    return byId.get(id);
  };
  const candidate = ([id, p, q]) => ({ id, text: data.texts[id], p, q });
  const answers = {
    runs: () => [data.run],
    keys: () => Object.keys(data.curves),
    curves: ({ key }) => Object.fromEntries([key].flat().filter((name) => data.curves[name]).map((name) => [name, data.curves[name]])),
    recipe: () => data.recipe,
    "held-out": () => data.held_out,
    advisories: () => data.advisories,
    waits: () => ({}),
    rows: (asked) => {
      const found = selected([...rows], asked);
      const first = Number(asked.offset ?? 0);
      const choices = Object.fromEntries(LABELS.map((name) => [name, [...new Set(rows.map((row) => row[name]).filter(Boolean))].sort()]));
      return { total: found.length, of: rows.length, rows: found.slice(first, first + PAGE), choices, complete: true };
    },
    row: ({ id }) => shown(id).detail,
    candidates: ({ id, from, to }) => (shown(id).candidates ?? []).slice(from, to).map(([teacher, student, tail, own_tail], nth) => (
      { place: Number(from) + nth, teacher: teacher.map(candidate), student: student.map(([one, q]) => candidate([one, null, q])), tail, own_tail })),
    worst: ({ step }) => data.worst.map((group) => ({ ...group, tokens: group.tokens.filter((one) => !step || one.step === Number(step)) })).filter((group) => group.tokens.length),
    same: ({ sum }) => rows.filter((row) => row.prompt_sum === Number(sum)),
    life: ({ key }) => data.lives[key] ?? [],
    timeline: ({ from, to }) => {
      const window = data.timeline;
      const [first, last] = [Math.max(window.from, from ?? window.from), Math.min(window.to, to ?? window.to)];
      const spans = window.spans.filter((one) => one.end >= first && one.start <= last);
      return { ...window, from: first, to: last, spans, counts: Object.fromEntries(Object.entries(window.counts).map(([name, one]) => [name, resampled(one, window, first, last)])) };
    },
  };
  return async (name, query) => answers[name](query);
}
