// The JavaScript kernel: node in V8's REPL mode, driven over the socket whose number is the first argument.
//
// In: {"code", "once", "always"}, one JSON object a line. Out: messages of type ready, number_of_executions, result,
// error and done. What the code prints goes to the ordinary stdout and stderr, which the server reads.
//
// V8's REPL mode gives top-level await, `const` that may be declared again, and the value of the last expression.
// It has no modules, so `import` is rewritten to a function that imports as a module in the working directory would.
'use strict'

const { Session } = require('node:inspector')
const { Socket } = require('node:net')
const Module = require('node:module')
const path = require('node:path')
const util = require('node:util')
const vm = require('node:vm')
const { pathToFileURL } = require('node:url')

const RESULT_BYTES_MAX = 32 * 1024 * 1024
const IMPORT = '__pal_import__'
const META = '__pal_meta__'
const [channelFd, language] = process.argv.slice(2)

const channel = new Socket({ fd: Number(channelFd) })
const session = new Session()
let interrupt = () => {}
let count = 0

function send(message) {
  let line = JSON.stringify(message)
  if (line.length > RESULT_BYTES_MAX) {
    const text = `<a result of ${line.length} bytes; the most is ${RESULT_BYTES_MAX}>`
    line = JSON.stringify({ ...message, data: { 'text/plain': text } })
  }
  channel.write(line + '\n')
}

function evaluate(code) {
  const expression = `${code}\n//# sourceURL=cell-${count}.js`
  return new Promise((resolve, reject) => {
    const options = { expression, replMode: true, awaitPromise: true, objectGroup: 'cell' }
    session.post('Runtime.evaluate', options, (error, answer) => (error ? reject(error) : resolve(answer)))
  })
}

// The value that a remote object stands for. Ours is not remote, so a function of ours can be called with it.
function local(remote) {
  return new Promise((resolve, reject) => {
    const { objectId, value, unserializableValue } = remote
    const argument = objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value }
    globalThis.__pal_take__ = resolve
    const call = { functionDeclaration: 'function (value) { __pal_take__({ value }) }', arguments: [argument] }
    session.post('Runtime.evaluate', { expression: 'globalThis', objectGroup: 'cell' }, (error, answer) => {
      if (error) return reject(error)
      session.post('Runtime.callFunctionOn', { ...call, objectId: answer.result.objectId }, (problem) => {
        delete globalThis.__pal_take__
        if (problem) reject(problem)
      })
    })
  })
}

async function valueOf(code) {
  const answer = await evaluate(code)
  const { value } = await local(answer.exceptionDetails ? answer.exceptionDetails.exception : answer.result)
  if (answer.exceptionDetails) throw new Thrown(value, answer.exceptionDetails)
  return value
}

// What the code threw, which may be anything, apart from what goes wrong in here.
class Thrown {
  constructor(value, details) {
    this.value = value
    this.details = details
  }
}

function describeError(error, details) {
  if (!util.types.isNativeError(error) && !(error instanceof Error)) {
    const text = util.inspect(error)
    return { type: 'error', name: 'Error', value: text, traceback: `Uncaught ${text}` }
  }
  const name = String(error.name || 'Error')
  let stack = String(error.stack || error).split('\n')
  const ours = stack.findIndex((line) => /^\s+at .*(node:inspector|node_kernel\.js)/.test(line))
  if (ours >= 0) stack = stack.slice(0, ours)
  if (name === 'SyntaxError' && details && !stack.some((line) => line.includes('cell-'))) {
    stack.push(`    at cell-${count}.js:${details.lineNumber + 1}:${details.columnNumber + 1}`)
  }
  return { type: 'error', name, value: String(error.message), traceback: stack.join('\n') }
}

// A value in the formats it has: text always, and those it offers in the manner of the ijavascript notebook.
function bundle(value) {
  const data = { 'text/plain': util.inspect(value) }
  if (value === null || typeof value !== 'object') return data
  const offered = { _toHtml: 'text/html', _toSvg: 'image/svg+xml', _toPng: 'image/png', _toJpeg: 'image/jpeg' }
  for (const [method, mime] of Object.entries(offered)) {
    if (typeof value[method] === 'function') data[mime] = String(value[method]())
  }
  return typeof value._toMime === 'function' ? { ...data, ...value._toMime() } : data
}

async function execute(code) {
  const interrupted = new Promise((_, reject) => {
    interrupt = () => reject(new Thrown(new Error('Execution was interrupted')))
  })
  try {
    const script = rewriteImports(language === 'typescript' ? stripTypes(code) : code)
    // A promise as the last expression is waited for, as a reader of the result would.
    const value = await Promise.race([valueOf(script), interrupted])
    const settled = util.types.isPromise(value) ? await Promise.race([asThrown(value), interrupted]) : value
    if (settled !== undefined) send({ type: 'result', data: bundle(settled), main: true })
  } catch (error) {
    send(error instanceof Thrown ? describeError(error.value, error.details) : describeError(error))
  } finally {
    interrupt = () => {}
    session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' })
  }
}

async function asThrown(promise) {
  try {
    return await promise
  } catch (error) {
    throw new Thrown(error)
  }
}

function stripTypes(code) {
  if (typeof Module.stripTypeScriptTypes !== 'function') {
    throw new Error(`TypeScript needs node 22.13 or newer, which can take types away; this is node ${process.versions.node}`)
  }
  return quietly(() => {
    try {
      return Module.stripTypeScriptTypes(code, { mode: 'transform' })
    } catch (error) {
      if (error.code !== 'ERR_INVALID_ARG_VALUE') throw error
      return Module.stripTypeScriptTypes(code)
    }
  })
}

// Without node's warnings that what we use is experimental; the user has not chosen it.
function quietly(act) {
  const warn = process.emitWarning
  process.emitWarning = () => {}
  try {
    return act()
  } finally {
    process.emitWarning = warn
  }
}

// `import` as if from a file in the working directory.
async function importHere(name, options) {
  const here = path.join(process.cwd(), 'cell.mjs')
  const loader = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER
  try {
    if (loader === undefined) return await import(/^\.{0,2}\//.test(name) ? pathToFileURL(path.resolve(name)).href : name)
    const source = '(name, options) => import(name, options)'
    const script = new vm.Script(source, { filename: here, importModuleDynamically: loader })
    return await quietly(() => script.runInThisContext()(name, options))
  } catch (error) {
    if (error.code !== 'ERR_MODULE_NOT_FOUND') throw error
    // Packages that were installed globally are known to require (NODE_PATH) but not to import.
    let found
    try {
      found = Module.createRequire(here).resolve(name)
    } catch {
      throw error
    }
    return import(pathToFileURL(found).href)
  }
}

const SKIPPED = /\/\/[^\n]*|\/\*[^]*?\*\/|"(?:\\[^]|[^"\\\n])*"|'(?:\\[^]|[^'\\\n])*'/y
const REGEXP = /\/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\[\n])+\/[a-z]*/y
const WORD = /[\p{ID_Start}$_][\p{ID_Continue}$]*/uy
const STATIC = /import\s*(?:([^'"();]+?)\s*from\s*)?(['"])([^'"\n]*)\2(?:\s*(?:with|assert)\s*(\{[^}]*\}))?/y

// Rewrites `import` where it is code, not in strings, comments, templates or regular expressions.
function rewriteImports(code) {
  if (!/\bimport\b/.test(code)) return code
  let made = ''
  let at = 0
  let before = '' // the last thing that was neither space nor comment
  const templates = [] // for each open `${`, how many braces are open in it
  const match = (pattern) => {
    pattern.lastIndex = at
    return pattern.exec(code)
  }
  const copy = (text) => {
    made += text
    at += text.length
  }
  const copyTemplate = () => {
    const end = /(?:\\[^]|\$(?!\{)|[^\\`$])*(?:`|\$\{|$)/y
    const text = match(end)[0]
    copy(text)
    if (text.endsWith('${')) templates.push(0)
    before = '`'
  }
  while (at < code.length) {
    const character = code[at]
    let found
    if ((found = match(SKIPPED))) {
      if (!found[0].startsWith('/')) before = '"'
      copy(found[0])
    } else if (character === '`') {
      copy('`')
      copyTemplate()
    } else if (character === '}' && templates.at(-1) === 0) {
      templates.pop()
      copy('}')
      copyTemplate()
    } else if (character === '/' && mayStartRegexp(before) && (found = match(REGEXP))) {
      copy(found[0])
      before = '"'
    } else if ((found = match(WORD))) {
      const word = found[0]
      const [text, length] = word === 'import' && before !== '.' ? importAt(code, at) : [word, word.length]
      made += text
      at += length
      before = word
    } else {
      if (templates.length > 0 && character === '{') templates[templates.length - 1] += 1
      if (templates.length > 0 && character === '}') templates[templates.length - 1] -= 1
      if (/\S/.test(character)) before = character
      copy(character)
    }
  }
  return made
}

function mayStartRegexp(before) {
  return before === '' || /^[([{,;=:?!&|+\-*%^~<>}]$/.test(before) || /^(?:return|typeof|case|in|of|void|delete|await|throw)$/.test(before)
}

// The replacement of the `import` at this place, and how long what it replaces is.
function importAt(code, at) {
  const rest = code.slice(at)
  const call = /^import\s*(?=\()/.exec(rest)
  if (call) return [IMPORT, call[0].length]
  const meta = /^import\s*\.\s*meta\b/.exec(rest)
  if (meta) return [`${META}()`, meta[0].length]
  STATIC.lastIndex = at
  const found = STATIC.exec(code)
  if (!found) return ['import', 'import'.length]
  const [whole, clause, , name, attributes] = found
  const options = attributes ? `, { with: ${attributes} }` : ''
  const imported = `await ${IMPORT}(${JSON.stringify(name)}${options})`
  // `;` before: an `(` or `[` that follows on the next line must not become part of it.
  return [clause === undefined ? `${imported};` : `${bindings(clause.trim(), imported)};`, whole.length]
}

function bindings(clause, imported) {
  if (/^type\s+(?!from\b|,)/.test(clause)) return ''
  const [, first, rest] = /^([\p{ID_Start}$_][\p{ID_Continue}$]*)?\s*,?\s*([^]*)$/u.exec(clause)
  const namespace = /^\*\s*as\s+(\S+)$/.exec(rest)
  if (namespace) return `const ${namespace[1]} = ${imported}${first ? `, ${first} = ${namespace[1]}.default` : ''}`
  const names = rest.replace(/^\{|\}$/g, '').split(',').map((name) => name.trim()).filter(Boolean)
  const pairs = names.map((name) => name.replace(/\s+as\s+/, ': '))
  return `const { ${[...(first ? [`default: ${first}`] : []), ...pairs].join(', ')} } = ${imported}`
}

function hidden(name, value) {
  Object.defineProperty(globalThis, name, { value, configurable: true, writable: true, enumerable: false })
}

async function run({ code, once, always }) {
  Object.assign(process.env, always)
  const kept = Object.fromEntries(Object.keys(once).map((name) => [name, process.env[name]]))
  Object.assign(process.env, once)
  count += 1
  send({ type: 'number_of_executions', execution_count: count })
  try {
    await execute(code)
  } finally {
    for (const [name, value] of Object.entries(kept)) {
      if (value === undefined) delete process.env[name]
      else process.env[name] = value
    }
  }
  send({ type: 'done' })
}

function start() {
  session.connect()
  const here = path.join(process.cwd(), 'cell.js')
  const require = Module.createRequire(here)
  const module = new Module(here)
  for (const [name, value] of Object.entries({ require, module, exports: module.exports, __filename: here, __dirname: process.cwd() })) {
    hidden(name, value)
  }
  hidden(IMPORT, importHere)
  hidden(META, () => ({ url: pathToFileURL(path.join(process.cwd(), 'cell.mjs')).href, filename: here, dirname: process.cwd() }))
  process.argv.splice(1)
  process.on('SIGINT', () => interrupt())
  // Something that fails later, in a timer or an unwatched promise, must not take the variables with it.
  process.on('uncaughtException', (error) => console.error('Uncaught', error))
  process.on('unhandledRejection', (error) => console.error('Uncaught (in promise)', error))

  let received = ''
  channel.setEncoding('utf8')
  channel.on('data', (text) => {
    received += text
    const lines = received.split('\n')
    received = lines.pop()
    for (const line of lines) run(JSON.parse(line))
  })
  channel.on('end', () => process.exit(0))
  channel.on('error', () => process.exit(0))
  send({ type: 'ready' })
}

start()
