// Asks the site's own search worker, as its pages do: node search.js SITE QUERY...
// Prints for each query the pages of the results, best first, as JSON.
const fs = require("fs"), path = require("path"), vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readFileSync(path.join(workers, fs.readdirSync(workers).find(name => name.endsWith(".js"))), "utf8")
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

let ask, answered
const scope = { addEventListener: (_, listener) => (ask = listener), postMessage: data => answered(data), console }
scope.self = scope
vm.runInNewContext(worker, scope)

const send = data => new Promise(resolve => { answered = resolve; ask({ data }) })
const main = async () => {
  await send({ type: 0, data: { ...index, options: { suggest: false } } })
  const results = {}
  for (const query of queries) {
    const { data } = await send({ type: 2, data: query })
    results[query] = data.items.map(([page]) => page.location)
  }
  console.log(JSON.stringify(results))
}
main()
