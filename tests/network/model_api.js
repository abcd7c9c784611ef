// A stand-in for the APIs of Anthropic, OpenAI and Google: every model says one sentence. It writes down what arrives.
const fs = require('fs'), http2 = require('http2');
const [key, cert, log, address] = process.argv.slice(2).map((path, at) => at < 2 ? fs.readFileSync(path) : path);
const TEXT = 'The word is BANANA.';
const usage = { input_tokens: 1, output_tokens: 5, total_tokens: 6 };

function sse(response, events) {
  response.writeHead(200, { 'content-type': 'text/event-stream' });
  for (const event of events) {
    if (event.type) response.write(`event: ${event.type}\n`);
    response.write(`data: ${typeof event === 'string' ? event : JSON.stringify(event)}\n\n`);
  }
  response.end();
}

function json(response, value, status = 200) {
  response.writeHead(status, { 'content-type': 'application/json' });
  response.end(JSON.stringify(value));
}

// Messages of Anthropic.
function messages(response, asked) {
  const message = { id: 'msg_1', type: 'message', role: 'assistant', model: asked.model, content: [], stop_reason: null, stop_sequence: null, usage };
  if (!asked.stream) return json(response, { ...message, content: [{ type: 'text', text: TEXT }], stop_reason: 'end_turn' });
  sse(response, [
    { type: 'message_start', message },
    { type: 'content_block_start', index: 0, content_block: { type: 'text', text: '' } },
    { type: 'content_block_delta', index: 0, delta: { type: 'text_delta', text: TEXT } },
    { type: 'content_block_stop', index: 0 },
    { type: 'message_delta', delta: { stop_reason: 'end_turn', stop_sequence: null }, usage },
    { type: 'message_stop' },
  ]);
}

// Responses of OpenAI.
function responses(response, asked) {
  const part = { type: 'output_text', text: TEXT, annotations: [] };
  const item = { id: 'item_1', type: 'message', role: 'assistant', status: 'completed', content: [part] };
  const base = { id: 'resp_1', object: 'response', created_at: 1, model: asked.model, status: 'in_progress', output: [] };
  const done = { ...base, status: 'completed', output: [item], usage: { ...usage, input_tokens_details: { cached_tokens: 0 }, output_tokens_details: { reasoning_tokens: 0 } } };
  if (!asked.stream) return json(response, done);
  const place = { item_id: 'item_1', output_index: 0, content_index: 0 };
  sse(response, [
    { type: 'response.created', response: base },
    { type: 'response.output_item.added', output_index: 0, item: { ...item, status: 'in_progress', content: [] } },
    { type: 'response.content_part.added', ...place, part: { ...part, text: '' } },
    { type: 'response.output_text.delta', ...place, delta: TEXT },
    { type: 'response.output_text.done', ...place, text: TEXT },
    { type: 'response.content_part.done', ...place, part },
    { type: 'response.output_item.done', output_index: 0, item },
    { type: 'response.completed', response: done },
  ]);
}

// Chat completions of OpenAI.
function chat(response, asked) {
  const base = { id: 'chat_1', created: 1, model: asked.model };
  const tokens = { prompt_tokens: 1, completion_tokens: 5, total_tokens: 6 };
  if (!asked.stream) {
    return json(response, { ...base, object: 'chat.completion', usage: tokens, choices: [{ index: 0, message: { role: 'assistant', content: TEXT }, finish_reason: 'stop' }] });
  }
  const chunk = (delta, finish_reason = null) => ({ ...base, object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason }] });
  sse(response, [chunk({ role: 'assistant', content: TEXT }), chunk({}, 'stop'), { ...base, object: 'chat.completion.chunk', choices: [], usage: tokens }, '[DONE]']);
}

// generateContent of Gemini.
function generate(response, url) {
  const answer = {
    candidates: [{ index: 0, content: { role: 'model', parts: [{ text: TEXT }] }, finishReason: 'STOP' }],
    usageMetadata: { promptTokenCount: 1, candidatesTokenCount: 5, totalTokenCount: 6 },
  };
  if (url.includes(':stream')) return sse(response, [answer]);
  json(response, answer);
}

http2.createSecureServer({ key, cert, allowHTTP1: true }, (request, response) => {
  const pieces = [];
  request.on('data', piece => pieces.push(piece));
  request.on('end', () => {
    const { method, url, headers, httpVersion } = request, body = Buffer.concat(pieces).toString();
    const host = headers[':authority'] || headers.host;
    fs.appendFileSync(log, JSON.stringify({ method, host, url, httpVersion, headers, body }) + '\n');
    let asked = {};
    try { asked = JSON.parse(body); } catch {}
    const path = url.split('?')[0];
    if (path.endsWith('count_tokens')) return json(response, { input_tokens: 1 });
    if (path.endsWith(':countTokens')) return json(response, { totalTokens: 1 });
    if (path.endsWith('/messages')) return messages(response, asked);
    if (path.endsWith('/responses')) return responses(response, asked);
    if (path.endsWith('/chat/completions')) return chat(response, asked);
    if (path.toLowerCase().includes('generatecontent')) return generate(response, url);
    if (path.endsWith('/models')) return json(response, { object: 'list', data: [], models: [] });
    json(response, { error: { type: 'not_found_error', message: 'no such page' } }, 404);
  });
}).listen(443, address, () => console.log('ready'));
