'use strict';
const assert = require('assert');
const fs = require('fs');
const root = process.cwd();
const { render } = require(root + '/src/render.js');
const { escapeHtml } = require(root + '/src/escape.js');

assert.strictEqual(escapeHtml(`<a href="x">'&'</a>`), '&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;');
assert.strictEqual(render('{{a}}-{{{a}}}', { a: '<b>' }), '&lt;b&gt;-<b>');
assert.strictEqual(render('[{{a}}{{{b}}}]', {}), '[]');
assert.strictEqual(render('{{n}}', { n: 0 }), '0');
for (const page of ['comment', 'profile', 'title']) {
  const show = require(`${root}/src/${page}.js`);
  assert.strictEqual(show('1 < 2 & "x"'), `<p class="${page}">1 &lt; 2 &amp; &quot;x&quot;</p>`);
  assert.ok(!fs.readFileSync(`${root}/src/${page}.js`, 'utf8').includes('&lt;'), page);
}
