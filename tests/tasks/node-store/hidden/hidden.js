'use strict';
const assert = require('assert');
const fs = require('fs');
const root = process.cwd();
const { Store } = require(root);

assert.strictEqual(Store, require(root + '/lib/kept/store.js').Store);
assert.ok(!fs.existsSync(root + '/lib/store.js'));
const store = new Store();
store.set('get', 1);
assert.strictEqual(store.get('get'), 1);
store.increment('get', 2);
store.increment('new', 5);
assert.deepStrictEqual([store.get('get'), store.get('new')], [3, 5]);
store.set('word', 'x');
assert.throws(() => store.increment('word', 1), TypeError);
assert.strictEqual(store.get('word'), 'x');
