// Ties the parts of the page together.

import { getJson } from "./api.js";
import { setUpBanner } from "./banner.js";
import { Control } from "./control.js";
import { Live, Plots, showState } from "./live.js";
import { Legend } from "./origins.js";
import { Playground } from "./playground.js";
import { Processes } from "./processes.js";
import { Stepper } from "./stepper.js";
import { setUpTheme } from "./theme.js";

setUpTheme();

const playground = new Playground(new Stepper(), new Legend());
const control = new Control();
const plots = new Plots();
const processes = new Processes();
let modelKnown = null; // the model of the loaded list

/** Reload the list when the served model changes. */
async function readModels(status) {
  if (!status?.model || status.model === modelKnown) return;
  modelKnown = status.model;
  try {
    const { data } = await getJson("v1/models");
    playground.setModels(data.map((each) => each.id));
    playground.setDefaults(data[0]?.sampling_defaults ?? {});
  } catch {
    playground.setModels([status.model]);
  }
}

const live = new Live([
  showState,
  readModels,
  (status) => status && playground.setMethods(status.methods),
  (status) => control.read(status),
  (status) => plots.read(status),
  (status) => processes.read(status),
]);
setUpBanner(() => live.ask());
live.ask();
