'use strict';

class Store {
  get(key) {
    return this[key];
  }

  set(key, value) {
    this[key] = value;
  }
}

module.exports = { Store };
