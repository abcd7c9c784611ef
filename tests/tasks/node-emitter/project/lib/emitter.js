'use strict';

class Emitter {
  constructor() {
    this.listeners = new Map();
  }

  on(name, listener) {
    const list = this.listeners.get(name) ?? [];
    list.push(listener);
    this.listeners.set(name, list);
    return this;
  }

  once(name, listener) {
    const wrapper = (...args) => {
      this.off(name, wrapper);
      listener(...args);
    };
    return this.on(name, wrapper);
  }

  off(name, listener) {
    const list = this.listeners.get(name) ?? [];
    const index = list.indexOf(listener);
    if (index >= 0) list.splice(index, 1);
    return this;
  }

  emit(name, ...args) {
    const list = this.listeners.get(name) ?? [];
    for (let index = 0; index < list.length; index++) list[index](...args);
    return list.length > 0;
  }
}

module.exports = Emitter;
