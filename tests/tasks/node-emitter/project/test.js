'use strict';
const assert = require('assert');
const Emitter = require('./lib/emitter');

const seen = [];
const emitter = new Emitter();
emitter.once('x', () => seen.push('first'));
emitter.on('x', () => seen.push('second'));
emitter.emit('x');
assert.deepStrictEqual(seen, ['first', 'second']);
console.log('ok');
