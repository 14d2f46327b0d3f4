// Ask the search of a built site as its page does: `node site_search.mjs <site>` reads queries from stdin, a JSON list,
// and prints the places that the site's own search worker finds for each, best first.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const SETUP = 0;
const QUERY = 2;
const site = process.argv[2];
const workers = path.join(site, "assets/javascripts/workers");
const run = (file) => vm.runInThisContext(fs.readFileSync(path.join(workers, file), "utf8"));

let handle;
let answer;
Object.assign(globalThis, {
  self: globalThis,
  addEventListener: (_, handler) => (handle = handler),
  postMessage: (message) => (answer = message),
  importScripts: (...files) => files.forEach(run),
});
run(fs.readdirSync(workers).find((file) => file.endsWith(".js")));

const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
await handle({ data: { type: SETUP, data: { ...index, options: { suggest: true } } } });
const found = {};
for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
  await handle({ data: { type: QUERY, data: query } });
  found[query] = answer.data.items.flat().filter((item) => item.score > 0).map((item) => item.location);
}
console.log(JSON.stringify(found));
