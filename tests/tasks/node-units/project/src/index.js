'use strict';
const { listFiles } = require('./parts/list');
const { total } = require('./parts/total');

module.exports = { listFiles, total };
