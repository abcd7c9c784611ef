'use strict';
const assert = require('assert');
const { compare } = require(process.cwd() + '/semver.js');

// From the page of Semantic Versioning, section 11, in ascending order.
const ascending = [
  '0.9.9', '1.0.0-alpha', '1.0.0-alpha.1', '1.0.0-alpha.beta', '1.0.0-beta', '1.0.0-beta.2', '1.0.0-beta.11',
  '1.0.0-rc.1', '1.0.0', '1.9.0', '1.10.0', '1.10.2', '2.0.0',
];
ascending.forEach((a, i) => ascending.forEach((b, j) => {
  assert.strictEqual(Math.sign(compare(a, b)), Math.sign(i - j), `${a} and ${b}`);
}));
assert.strictEqual(compare('1.0.0+build.1', '1.0.0+build.2'), 0);
assert.strictEqual(compare('1.0.0-rc.1+x', '1.0.0-rc.1'), 0);
assert.strictEqual(compare('v1.2.3', '1.2.3'), 0);
assert.strictEqual(Math.sign(compare('v1.10.0', 'v1.9.0')), 1);
