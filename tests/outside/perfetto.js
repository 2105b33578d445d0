// Runs Perfetto's engine as its page does: node perfetto.js DIRECTORY < requests > answers.
// DIRECTORY has engine_bundle.js and its WebAssembly. The bundle is a worker: it takes a port, then messages from it.
const fs = require('fs'), path = require('path'), vm = require('vm');
const [directory, requests] = [process.argv[2], fs.readFileSync(0)];
const node = process, answers = [], host = 'localhost';

function end(error) {
  fs.writeSync(2, String(error).slice(0, 500) + '\n');  // whole errors quote a bundle of one line
  node.exit(1);
}
for (const event of ['uncaughtException', 'unhandledRejection']) node.on(event, end);

class Request {
  open(_, address) { this.address = address; }
  send() {
    const data = fs.readFileSync(path.join(directory, path.basename(this.address)));
    [this.status, this.response] = [200, data.buffer.slice(data.byteOffset, data.byteOffset + data.length)];
    if (this.onload) setTimeout(() => this.onload(), 0);
  }
}
const location = {href: `http://${host}/`, protocol: 'http:', host, pathname: '/'};
Object.assign(globalThis, {self: globalThis, WorkerGlobalScope: class {}, XMLHttpRequest: Request, importScripts() {}, location});

const ready = new Promise(resolve => {
  const set = WebAssembly.Table.prototype.set;  // the bundle registers its callback once its module stands
  WebAssembly.Table.prototype.set = function (...given) { setTimeout(resolve, 1000); return set.apply(this, given); };
});
const port = {postMessage: data => answers.push(Buffer.from(data))};
const bundle = fs.readFileSync(path.join(directory, 'engine_bundle.js'), 'utf8');
vm.runInThisContext(`(function (process, require, module, exports) {${bundle}\n})`)();
self.onmessage({data: port});
ready.then(() => {
  port.onmessage({data: new Uint8Array(requests)});
  fs.writeSync(1, Buffer.concat(answers));
  node.exit(0);
});
