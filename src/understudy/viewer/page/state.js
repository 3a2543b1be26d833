// Which runs there are, and which of them are shown.

// Okabe and Ito's colours, which differ for every kind of colour vision.
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
export const state = { runs: [], off: new Set(), view: null, refresh: null };

export function shownRuns() {
  return state.runs.map((run, index) => ({ ...run, index, colour: COLOURS[index % COLOURS.length] })).filter((run) => !state.off.has(run.index));
}
