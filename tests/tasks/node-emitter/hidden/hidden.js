'use strict';
const assert = require('assert');
const Emitter = require(process.cwd() + '/lib/emitter.js');

{
  const seen = [];
  const emitter = new Emitter();
  emitter.on('x', (value) => seen.push(value));
  assert.strictEqual(emitter.emit('x', 1), true);
  assert.strictEqual(emitter.emit('y', 1), false);
  assert.deepStrictEqual(seen, [1]);
}
{
  const seen = [];
  const emitter = new Emitter();
  emitter.once('x', () => seen.push('a')).once('x', () => seen.push('b')).on('x', () => seen.push('c'));
  emitter.emit('x');
  emitter.emit('x');
  assert.deepStrictEqual(seen, ['a', 'b', 'c', 'c']);
}
{
  const emitter = new Emitter();
  const never = () => assert.fail('was removed');
  emitter.once('x', never).off('x', never);
  emitter.emit('x');
}
{
  const seen = [];
  const emitter = new Emitter();
  emitter.on('x', () => {
    seen.push('old');
    if (seen.length === 1) emitter.on('x', () => seen.push('new'));
  });
  emitter.emit('x');
  assert.deepStrictEqual(seen, ['old']);
  emitter.emit('x');
  assert.deepStrictEqual(seen, ['old', 'old', 'new']);
}
