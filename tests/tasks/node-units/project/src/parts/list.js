'use strict';
const { showSize } = require('./size');

exports.listFiles = (files) => files.map(({ name, size }) => `${name} ${showSize(size)}`);
