'use strict';
const { render } = require('./render');

module.exports = (profile) => render('<p class="profile">{{profile}}</p>', { profile: profile.replace(/</g, '&lt;') });
