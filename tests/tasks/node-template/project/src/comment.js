'use strict';
const { render } = require('./render');

module.exports = (comment) => render('<p class="comment">{{comment}}</p>', { comment: comment.replace(/</g, '&lt;') });
