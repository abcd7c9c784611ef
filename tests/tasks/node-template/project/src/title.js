'use strict';
const { render } = require('./render');

module.exports = (title) => render('<p class="title">{{title}}</p>', { title: title.replace(/</g, '&lt;') });
