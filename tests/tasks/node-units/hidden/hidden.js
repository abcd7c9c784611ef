'use strict';
const assert = require('assert');
const { listFiles, total } = require(process.cwd() + '/src/index.js');

assert.deepStrictEqual(listFiles([{ name: 'a', size: 1023 }, { name: 'b', size: 1536 }]), ['a 1023 B', 'b 1.5 KiB']);
assert.strictEqual(total([{ size: 1000 }, { size: 24 }]), '1.0 KiB');
assert.strictEqual(total([{ size: 1000 }, { size: 23 }]), '1023 B');
assert.strictEqual(total([]), '0 B');
