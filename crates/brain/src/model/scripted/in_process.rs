//! The scripted model without a wire.

use std::{path::PathBuf, time::Duration};

use serde_json::json;

use crate::model::{
    Answer, AnswerFuture, ContentBlock, Model, ModelAddress, ModelDelta, ModelError, ModelProgress,
    ModelRequest, OpaqueBlock, ToolArguments, ToolCall, Wire, retry::RetryPolicy,
};

use super::{
    script::{Script, ScriptFault},
    track::{Conversation, PlannedAnswer},
};

/// The name of every scripted model.
const MODEL: &str = "script";

/// How long a scripted endpoint asks to wait after a refusal.
pub(super) const RETRY_AFTER: Duration = Duration::from_millis(10);

/// A model that answers from a script.
pub struct ScriptedModel {
    script: Script,
    address: ModelAddress,
    retry: RetryPolicy,
}

impl ScriptedModel {
    /// Makes a model of a script; `file` is the script's name in the address.
    pub fn new(script: Script, file: PathBuf, retry: RetryPolicy) -> Self {
        // Nothing is overloaded here, so that only the number of attempts matters.
        let retry = RetryPolicy { wait_first: RETRY_AFTER, ..retry };
        Self { script, address: ModelAddress::Script { file }, retry }
    }

    async fn attempt(
        &self,
        request: &ModelRequest,
        attempt: u32,
        progress: &(dyn Fn(ModelProgress) + Send + Sync),
    ) -> Result<Answer, ModelError> {
        let planned =
            self.script.plan(&Conversation::of(request)).map_err(|message| ModelError::Script { message })?;
        let error = planned.fault_at(attempt as usize).and_then(|fault| to_error(fault, &planned));
        let pieces = to_pieces(&planned);
        let sent = match &error {
            None => pieces.len(),
            Some(error) if comes_midway(error) => pieces.len() / 2,
            Some(_) => 0,
        };
        for piece in pieces.into_iter().take(sent) {
            if planned.pause_ms > 0 {
                tokio::time::sleep(Duration::from_millis(planned.pause_ms)).await;
            }
            progress(ModelProgress::Delta(piece));
        }
        match error {
            Some(error) => Err(error),
            None => Ok(to_answer(planned)),
        }
    }
}

impl Model for ScriptedModel {
    fn address(&self) -> &ModelAddress {
        &self.address
    }

    fn answer<'a>(
        &'a self,
        request: &'a ModelRequest,
        progress: &'a (dyn Fn(ModelProgress) + Send + Sync),
    ) -> AnswerFuture<'a> {
        Box::pin(self.retry.run(progress, move |attempt| self.attempt(request, attempt, progress)))
    }
}

/// The error that a client makes of a fault; none for a fault that only delays.
fn to_error(fault: ScriptFault, planned: &PlannedAnswer) -> Option<ModelError> {
    let message = "the script says so".to_owned();
    let retry_after = Some(RETRY_AFTER);
    Some(match fault {
        ScriptFault::Slow => return None,
        ScriptFault::RateLimit => ModelError::RateLimited { retry_after, message },
        ScriptFault::Overload => ModelError::Overloaded { retry_after, message },
        ScriptFault::Error => ModelError::Overloaded { retry_after: None, message },
        ScriptFault::Server => ModelError::Server { status: 500, retry_after, message },
        ScriptFault::Cut | ScriptFault::Drop => ModelError::StreamCut { message },
        ScriptFault::Malformed => ModelError::MalformedStream { message },
        ScriptFault::Overflow => ModelError::ContextOverflow { message },
        ScriptFault::Refusal => ModelError::Refused { message, usage: planned.usage },
    })
}

fn comes_midway(error: &ModelError) -> bool {
    match error {
        ModelError::StreamCut { .. } | ModelError::MalformedStream { .. } => true,
        ModelError::Overloaded { retry_after, .. } => retry_after.is_none(),
        _ => false,
    }
}

/// The pieces in which an answer arrives: text word by word, the arguments of a call at once.
fn to_pieces(planned: &PlannedAnswer) -> Vec<ModelDelta> {
    let words = |text: &str| text.split_inclusive(' ').map(str::to_owned).collect::<Vec<_>>();
    let mut pieces = Vec::new();
    let think = planned.think.as_deref().unwrap_or_default();
    pieces.extend(words(think).into_iter().map(|text| ModelDelta::Reasoning { text }));
    pieces.extend(words(&planned.text).into_iter().map(|text| ModelDelta::Text { text }));
    for (index, call) in planned.calls.iter().enumerate() {
        pieces.push(ModelDelta::CallStarted { index, id: call.id.clone(), name: call.name.clone() });
        pieces.push(ModelDelta::CallArguments { index, text: call.arguments.clone() });
    }
    pieces
}

fn to_answer(planned: PlannedAnswer) -> Answer {
    let mut blocks = Vec::new();
    if let Some(text) = planned.think {
        let raw = json!({ "think": &text }).to_string();
        blocks.push(ContentBlock::Opaque(OpaqueBlock {
            wire: Wire::Script,
            model: MODEL.to_owned(),
            raw,
            text,
        }));
    }
    if !planned.text.is_empty() {
        blocks.push(ContentBlock::Text { text: planned.text });
    }
    blocks.extend(planned.calls.into_iter().map(|call| {
        ContentBlock::ToolCall(ToolCall {
            arguments: ToolArguments::parse(&call.arguments),
            id: call.id,
            name: call.name,
        })
    }));
    Answer { blocks, stop: planned.stop, usage: planned.usage, model: MODEL.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::model::ChatMessage;

    /// Asks once and gives the result, the kinds of the failed attempts and the text that arrived.
    async fn ask(script: &str) -> (Result<Answer, ModelError>, Vec<&'static str>, String) {
        let model =
            ScriptedModel::new(Script::parse(script).unwrap(), "s.toml".into(), RetryPolicy::default());
        let request =
            ModelRequest { messages: vec![ChatMessage::from_user("go")], ..ModelRequest::default() };
        let seen = Mutex::new((Vec::new(), String::new()));
        let note = |progress: ModelProgress| {
            let mut seen = seen.lock().unwrap();
            match progress {
                ModelProgress::AttemptFailed { error, .. } => seen.0.push(error.kind()),
                ModelProgress::Delta(ModelDelta::Text { text }) => seen.1.push_str(&text),
                _ => {}
            }
        };
        let result = model.answer(&request, &note).await;
        let (failed, text) = seen.into_inner().unwrap();
        (result, failed, text)
    }

    #[tokio::test(start_paused = true)]
    async fn every_fault_has_its_outcome() {
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
        for (fault, kind, is_mended) in cases {
            let (result, failed, _) = ask(&format!("[[turns]]\ntext = 'a b'\nfault = '{fault}'")).await;
            assert_eq!(failed, [kind], "{fault}");
            assert_eq!(result.is_ok(), is_mended, "{fault}: {result:?}");
        }
        let (result, failed, _) = ask("[[turns]]\ntext = 'a'\nfault = '500'\ntimes = 'forever'").await;
        assert_eq!((result.unwrap_err().kind(), failed.len()), ("server_error", 6));
        let (result, failed, text) = ask("[[turns]]\ntext = 'a b'\nfault = 'cut'").await;
        assert_eq!((failed.len(), text.as_str()), (1, "a a b"), "the first half came before the cut");
        assert_eq!(result.unwrap().text(), "a b");
        let (result, failed, _) = ask("[[turns]]\ntext = 'a b'\nfault = 'slow'").await;
        assert_eq!((result.unwrap().text().as_str(), failed.len()), ("a b", 0));
        let (result, failed, _) = ask("[[turns]]\nfault = 'overflow'\nover_messages = 1\ntext = 'ok'").await;
        assert_eq!((result.unwrap().text().as_str(), failed.len()), ("ok", 0), "one message is not too long");
    }

    #[tokio::test]
    async fn an_answer_has_thought_text_and_calls() {
        let script = "[[turns]]\nthink = 't'\ntext = 'x'\ncalls = [{ tool = 'ls', arguments = { a = 1 } }, { tool = 'ls', arguments = '{' }]";
        let answer = ask(script).await.0.unwrap();
        assert!(matches!(&answer.blocks[0], ContentBlock::Opaque(block) if block.text == "t"));
        let calls: Vec<&ToolCall> = answer.calls().collect();
        assert_eq!(calls[0].arguments, ToolArguments::parse(r#"{"a":1}"#));
        assert_eq!(calls[1].arguments, ToolArguments::Invalid("{".into()));
        assert_eq!((calls[0].id.as_str(), calls[1].id.as_str()), ("call_main_1_1", "call_main_1_2"));
    }
}
