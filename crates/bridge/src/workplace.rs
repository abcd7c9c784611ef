//! The place in which the tools of an agent act: its Body.
//!
//! Invariant: everything that a model asks for runs in the Body, with the rights of the Body's user.
//! Invariant: a call that a crash cut off is repeated only in the life of the Body in which it began: see
//! [`Workplace::find_life`]. Within one life the guest carries out each key once.

use std::{sync::Arc, time::Duration};

use brain::agent::CallContext;
use fleet::{EventOrder, EventQuery, Exec, ExecControl, ExecRequest, Fleet, KeptOutput, StartError};
use proto::{
    AgentId, BodyId, ChainId, Failure, Kind,
    event_data::{BodyStarted, CallStarted, EventKind},
    file_call::{FileAnswer, FileCall},
};
use sha2::{Digest, Sha256};

use crate::files::BodyLife;

/// The longest key that is used as it is; the guest takes longer ones for none.
const KEY_LEN_MAX: usize = 200;
/// How many calls back the call of a context is searched for: only calls of the newest answer can be open.
const CALLS_BACK_MAX: usize = 256;
/// The number of the signal that no process ignores.
const SIGKILL: i32 = 9;

/// The Body of an agent, for the agent's tools.
#[derive(Clone)]
pub struct Workplace {
    fleet: Arc<Fleet>,
    agent: AgentId,
    body: BodyId,
    workdir: String,
}

impl Workplace {
    /// The Body in which this agent works, and the directory of its commands.
    pub fn new(fleet: Arc<Fleet>, agent: AgentId, body: BodyId, workdir: impl Into<String>) -> Self {
        Self { fleet, agent, body, workdir: workdir.into() }
    }

    /// This place, but in another Body, such as a fork for one call.
    #[must_use]
    pub fn in_body(&self, body: BodyId) -> Self {
        Self { body, ..self.clone() }
    }

    /// The fleet.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// The agent.
    pub fn agent(&self) -> &AgentId {
        &self.agent
    }

    /// The Body.
    pub fn body(&self) -> &BodyId {
        &self.body
    }

    /// The working directory of commands.
    pub fn workdir(&self) -> &str {
        &self.workdir
    }

    /// Carries out an operation on files of the Body.
    pub async fn file_call(&self, call: &FileCall) -> Result<FileAnswer, Failure> {
        self.fleet.files().call(&self.body, call).await
    }

    /// Starts a command, or follows the kept one that has its tag.
    pub async fn start(&self, request: ExecRequest) -> Result<Exec<'_>, StartError> {
        self.fleet.execs().start(&self.body, request).await
    }

    /// Reads output of a kept command; `None` if the guest does not know it.
    pub async fn read_kept(
        &self,
        tag: &str,
        from: u64,
        wait: Duration,
    ) -> Result<Option<KeptOutput>, Failure> {
        self.fleet.execs().read_kept(&self.body, tag, from, wait).await
    }

    /// Controls a kept command; `None` if the guest does not know it.
    pub async fn control_kept(&self, tag: &str) -> Result<Option<ExecControl>, Failure> {
        self.fleet.execs().kept_control(&self.body, tag).await
    }

    /// Kills a kept command and the other processes of its process group.
    pub async fn kill_kept(&self, tag: &str) -> Result<(), Failure> {
        let running = self.fleet.execs().tagged(&self.body).await?;
        let pid = running.iter().find(|(other, _)| other == tag).map(|(_, pid)| *pid);
        if let Some(pid) = pid {
            // A signal through the guest reaches the leader only.
            let script = format!("kill -s KILL -- -{pid}");
            if let Ok(mut exec) = self.start(ExecRequest::new(["/bin/sh", "-c", &script])).await {
                while let Ok(Some(_)) = exec.next().await {}
                exec.finish().await?;
            }
        }
        if let Some(control) = self.control_kept(tag).await? {
            // It fails if the command has ended, which is what we want.
            let _ = control.signal(SIGKILL).await;
        }
        Ok(())
    }

    /// Whether the Body still lives the life in which a call of this agent began.
    pub async fn find_life(&self, context: &CallContext) -> Result<BodyLife, Failure> {
        let (place, key) = (self.clone(), context.key.clone());
        let found = tokio::task::spawn_blocking(move || place.look_up_life(&key)).await;
        found.unwrap_or_else(|error| {
            Err(Failure::new(Kind::Internal, "reading the agent's log was interrupted").because(error))
        })
    }

    fn look_up_life(&self, key: &str) -> Result<BodyLife, Failure> {
        let calls = EventQuery {
            kinds: CallStarted::NAMES.to_vec(),
            order: EventOrder::NewestFirst,
            limit: CALLS_BACK_MAX,
            ..EventQuery::of_chain(&ChainId::Agent(self.agent.clone()))
        };
        let calls = self.fleet.log().read(&calls)?;
        let is_call = |data: CallStarted| data.key == key;
        let began = calls.iter().find(|event| event.data_as::<CallStarted>().is_some_and(is_call));
        let Some(began) = began.filter(|event| event.body.as_ref() == Some(&self.body)) else {
            return Ok(BodyLife::Another);
        };
        let lives = EventQuery {
            after: began.pos,
            kinds: BodyStarted::NAMES.to_vec(),
            limit: 1,
            ..EventQuery::of_body(&self.body)
        };
        let restarted = !self.fleet.log().read(&lives)?.is_empty();
        Ok(if restarted { BodyLife::Another } else { BodyLife::Same })
    }
}

/// The key of a call for the guest. A model chooses a part of the key and may make it long, so that a long one is replaced
/// by its digest.
pub fn guest_key(key: &str) -> String {
    if key.len() <= KEY_LEN_MAX && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return key.to_owned();
    }
    let digest: String = Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256-{digest}")
}

/// A failure in words for a model.
pub fn explain(failure: &Failure) -> String {
    let mut text = failure.message.clone();
    for cause in failure.causes() {
        text.push_str(": ");
        text.push_str(&cause);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_a_model_fits_the_guest() {
        assert_eq!(guest_key("agent1-3-toolu_01"), "agent1-3-toolu_01");
        let long = guest_key(&"x".repeat(10_000));
        assert!(long.len() < KEY_LEN_MAX && long.starts_with("sha256-"));
        assert_ne!(guest_key("a\nb"), guest_key("a\rb"));
    }
}
