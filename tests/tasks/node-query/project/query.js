'use strict';

function parse(text) {
  const result = {};
  for (const pair of text.replace(/^\?/, '').split('&')) {
    if (pair === '') continue;
    const [key, value = ''] = pair.split('=');
    result[decodeURIComponent(key)] = decodeURIComponent(value);
  }
  return result;
}

module.exports = { parse };
