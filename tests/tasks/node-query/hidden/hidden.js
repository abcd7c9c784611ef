'use strict';
const assert = require('assert');
const { parse } = require(process.cwd() + '/query.js');

const plain = (text) => Object.entries(parse(text));
assert.deepStrictEqual(plain('?a=1&b=2'), [['a', '1'], ['b', '2']]);
assert.deepStrictEqual(plain(''), []);
assert.deepStrictEqual(plain('a&&b='), [['a', ''], ['b', '']]);
assert.deepStrictEqual(plain('x=a%20b'), [['x', 'a b']]);
assert.deepStrictEqual(plain('x=a+b&y+z=1'), [['x', 'a b'], ['y z', '1']]);
assert.deepStrictEqual(plain('x=1&y=2&x=3&x='), [['x', ['1', '3', '']], ['y', '2']]);
assert.deepStrictEqual(plain('x=a=b'), [['x', 'a=b']]);
assert.deepStrictEqual(plain('x=100%&y=%zz+1'), [['x', '100%'], ['y', '%zz 1']]);
assert.deepStrictEqual(plain('__proto__=1'), [['__proto__', '1']]);
assert.deepStrictEqual(plain('toString=1'), [['toString', '1']]);
