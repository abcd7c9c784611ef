//! Tests of the client against the scripted server and against endpoints that misbehave.

use std::{net::SocketAddr, sync::Mutex};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
};

use super::*;
use crate::model::{
    ChatMessage, ContentBlock, ToolArguments, ToolResult,
    scripted::{ModelServer, Script, ServerOptions},
};

const WIRES: [&str; 3] = ["anthropic", "chat", "responses"];
const KEY: &str = "sk-very-secret";

/// Ends its task when the test ends.
struct TaskGuard<T>(JoinHandle<T>);

impl<T> Drop for TaskGuard<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn serve(script: &str, chunk_bytes: Option<usize>) -> (SocketAddr, impl Drop) {
    let options = ServerOptions { chunk_bytes, key: Some(ApiKey::new(KEY)) };
    let script = Script::parse(script).unwrap();
    let server = ModelServer::bind(script, "127.0.0.1:0".parse().unwrap(), options).await.unwrap();
    let address = server.address();
    (address, TaskGuard(tokio::spawn(server.run())))
}

fn client(address: SocketAddr, wire: &str, options: HttpOptions) -> HttpModel {
    let address = format!("m@http://{address}#{wire}").parse().unwrap();
    HttpModel::new(address, Some(ApiKey::new(KEY)), options).unwrap()
}

fn quick() -> HttpOptions {
    let retry =
        RetryPolicy { attempts_max: 2, wait_first: Duration::from_millis(1), ..RetryPolicy::default() };
    HttpOptions { retry, ..HttpOptions::default() }
}

/// Asks and gives the result with the kinds of the failed attempts.
async fn ask(model: &HttpModel, request: &ModelRequest) -> (Result<Answer, ModelError>, Vec<&'static str>) {
    let failed = Mutex::new(Vec::new());
    let result = model
        .answer(request, &|progress| {
            if let ModelProgress::AttemptFailed { error, .. } = progress {
                failed.lock().unwrap().push(error.kind());
            }
        })
        .await;
    (result, failed.into_inner().unwrap())
}

fn start() -> ModelRequest {
    ModelRequest { messages: vec![ChatMessage::from_user("go")], ..ModelRequest::default() }
}

const CONVERSATION: &str = r#"
[[turns]]
think = "Erst schauen: ä 🦀."
text = "I look."
calls = [{ tool = "ls", arguments = { path = "/" } }, { tool = "cat", arguments = '{"bad' }, { tool = "now" }]
usage = { input = 10, output = 5, cache_read = 3, cache_write = 2 }
[[turns]]
expect = ["three files", "no such thing"]
text = "Done."
stop = "max_tokens"
"#;

#[tokio::test]
async fn a_whole_conversation_works_on_every_wire_and_in_every_cut() {
    for wire in WIRES {
        for chunk_bytes in [None, Some(1), Some(100)] {
            let (address, _guard) = serve(CONVERSATION, chunk_bytes).await;
            let model = client(address, wire, quick());
            let mut request = start();
            let answer = ask(&model, &request).await.0.unwrap();
            assert_eq!(
                (answer.text().as_str(), answer.stop.clone()),
                ("I look.", crate::model::StopReason::ToolUse)
            );
            let ids: Vec<String> = answer.calls().map(|call| call.id.clone()).collect();
            assert_eq!(ids, ["call_main_1_1", "call_main_1_2", "call_main_1_3"], "{wire}");
            let calls: Vec<&ToolArguments> = answer.calls().map(|call| &call.arguments).collect();
            assert_eq!(calls[0], &ToolArguments::parse(r#"{"path":"/"}"#), "{wire}");
            assert_eq!(calls[1], &ToolArguments::Invalid("{\"bad".into()), "{wire}");
            let usage = answer.usage;
            assert_eq!(
                (usage.input, usage.output, usage.cache_read, usage.cache_write),
                (10, 5, 3, 2),
                "{wire}"
            );
            let thought = answer.blocks.iter().find_map(|block| match block {
                ContentBlock::Opaque(opaque) => Some(opaque.text.as_str()),
                _ => None,
            });
            assert_eq!(thought, Some("Erst schauen: ä 🦀."), "{wire}");
            request.messages.push(ChatMessage::from_model(answer.blocks));
            let results = ids.into_iter().zip(["three files", "no such thing", "noon"]);
            request
                .messages
                .push(ChatMessage::from_results(results.map(|(id, text)| ToolResult::from_text(id, text))));
            // The server refuses changed thoughts and open calls, so this also judges the echo.
            let answer = ask(&model, &request).await.0.unwrap();
            assert_eq!((answer.text().as_str(), answer.stop), ("Done.", crate::model::StopReason::MaxTokens));
        }
    }
}

#[tokio::test]
async fn every_fault_has_one_outcome_on_every_wire() {
    let cases = [
        ("429", "rate_limited", true),
        ("529", "overloaded", true),
        ("500", "server_error", true),
        ("cut", "stream_cut", true),
        ("drop", "stream_cut", true),
        ("error", "overloaded", true),
        ("malformed", "malformed_stream", true),
        ("overflow", "context_overflow", false),
        ("refusal", "refused", false),
    ];
    for wire in WIRES {
        for (fault, kind, is_mended) in cases {
            let script = format!("[[turns]]\ntext = 'a long enough answer'\nfault = '{fault}'");
            let (address, _guard) = serve(&script, None).await;
            let (result, failed) = ask(&client(address, wire, quick()), &start()).await;
            assert_eq!(failed, [kind], "{wire} {fault}");
            assert_eq!(result.is_ok(), is_mended, "{wire} {fault}: {result:?}");
            let script = format!("{script}\ntimes = 'forever'");
            let (address, _guard) = serve(&script, Some(1)).await;
            let (result, failed) = ask(&client(address, wire, quick()), &start()).await;
            assert_eq!(failed, vec![kind; if is_mended { 2 } else { 1 }], "{wire} {fault}");
            assert_eq!(result.unwrap_err().kind(), kind, "{wire} {fault}");
        }
    }
}

#[tokio::test]
async fn a_script_that_does_not_fit_is_a_bad_request_with_its_reason() {
    let (address, _guard) = serve("[[turns]]\nexpect = ['green']", None).await;
    for wire in WIRES {
        let (result, _) = ask(&client(address, wire, quick()), &start()).await;
        let error = result.unwrap_err();
        assert!(
            matches!(&error, ModelError::BadRequest { message, .. } if message.contains("`green`")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_never_shown() {
    let (address, _guard) = serve(CONVERSATION, None).await;
    for wire in WIRES {
        let address = format!("m@http://{address}#{wire}").parse().unwrap();
        let model = HttpModel::new(address, None, quick()).unwrap();
        let (result, failed) = ask(&model, &start()).await;
        assert!(matches!(result, Err(ModelError::Authentication { status: 401, .. })), "{wire}: {result:?}");
        assert_eq!(failed.len(), 1);
    }
    let answer = format!("HTTP/1.1 401 No\r\ncontent-length: {}\r\n\r\nwrong key {KEY}!", KEY.len() + 11);
    let (address, _guard) = misbehave(answer, AfterAnswer::Close).await;
    let error = ask(&client(address, "chat", quick()), &start()).await.0.unwrap_err();
    assert!(format!("{error} {error:?}").contains("wrong key …!"), "{error}");
    assert!(!format!("{error} {error:?}").contains(KEY), "{error:?}");
    assert!(!format!("{:?}", ApiKey::new(KEY)).contains(KEY));
    assert!(matches!(
        HttpModel::new("m@http://h".parse().unwrap(), Some(ApiKey::new("a\nb")), quick()),
        Err(HttpModelError::Key)
    ));
}

/// The end of a connection to a misbehaving endpoint.
#[derive(Clone, Copy)]
enum AfterAnswer {
    Close,
    Silence,
    Repeat(&'static str),
}

/// An endpoint that answers every connection with the same bytes.
async fn misbehave(answer: String, after: AfterAnswer) -> (SocketAddr, impl Drop) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(answer.as_bytes()).await;
            match after {
                AfterAnswer::Close => {}
                AfterAnswer::Silence => open.push(stream),
                AfterAnswer::Repeat(text) => {
                    while stream.write_all(text.repeat(10_000).as_bytes()).await.is_ok() {}
                }
            }
        }
    });
    (address, TaskGuard(task))
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn silence_and_endless_answers_end_within_their_bounds() {
    let short = Duration::from_millis(200);
    let once = RetryPolicy { attempts_max: 1, ..RetryPolicy::default() };
    let idle = HttpOptions { idle_timeout: short, retry: once, ..HttpOptions::default() };
    let total = HttpOptions { total_timeout: short, retry: once, ..HttpOptions::default() };
    for answer in ["", HEAD] {
        let (address, _guard) = misbehave(answer.to_owned(), AfterAnswer::Silence).await;
        for options in [idle, total] {
            let error = ask(&client(address, "chat", options), &start()).await.0.unwrap_err();
            assert!(matches!(error, ModelError::Timeout { after, .. } if after == short), "{error:?}");
        }
    }
    let options = HttpOptions { retry: once, ..HttpOptions::default() };
    let (address, _guard) = misbehave(HEAD.to_owned(), AfterAnswer::Repeat(": more and more\n")).await;
    let error = ask(&client(address, "anthropic", options), &start()).await.0.unwrap_err();
    assert!(matches!(error, ModelError::TooLarge { .. }), "{error:?}");
}

#[tokio::test]
async fn a_missing_endpoint_is_unreachable_and_a_redirect_is_not_followed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = listener.local_addr().unwrap();
    drop(listener);
    let (result, failed) = ask(&client(gone, "chat", quick()), &start()).await;
    assert!(matches!(result, Err(ModelError::Unreachable { .. })), "{result:?}");
    assert_eq!(failed, ["unreachable", "unreachable"], "an endpoint may come back");
    let (target, _guard) = serve(CONVERSATION, None).await;
    let location = format!(
        "HTTP/1.1 307 X\r\nlocation: http://{target}/v1/chat/completions\r\ncontent-length: 0\r\n\r\n"
    );
    let (address, _guard) = misbehave(location, AfterAnswer::Close).await;
    let (result, _) = ask(&client(address, "chat", quick()), &start()).await;
    assert!(matches!(result, Err(ModelError::BadRequest { status: 307, .. })), "{result:?}");
}

#[tokio::test]
async fn a_dropped_call_closes_its_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let model = client(address, "chat", HttpOptions::default());
    let request = start();
    let call = model.answer(&request, &|_| {});
    let accepted = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        assert!(stream.read(&mut head).await.unwrap() > 0, "the request came");
        stream
    };
    let mut stream = tokio::select! {
        result = call => panic!("an answer without an endpoint: {result:?}"),
        stream = accepted => stream,
    };
    let mut rest = Vec::new();
    let end = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await;
    assert!(end.is_ok(), "the connection stays open after the call was dropped");
}
