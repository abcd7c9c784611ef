//! Live updates of agents, for the clients that watch them.
//!
//! A client watches an agent whether or not it is driven now: the channel of an agent is there before its driver, so that
//! the client sees the first piece of the next answer.
//!
//! Invariant: a client that reads slowly holds no driver up; it misses updates.
//! Invariant: an agent without a driver and without a watcher has no channel.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use bridge::{live_channel, watch_live};
use proto::AgentId;
use tokio::{
    io::{BufReader, Lines},
    net::UnixStream,
    sync::broadcast::{self, error::RecvError},
};

use super::AgentService;

/// The channels of agents that are driven here or watched.
#[derive(Debug, Default)]
pub struct LiveChannels(Mutex<HashMap<AgentId, broadcast::Sender<Arc<str>>>>);

impl LiveChannels {
    /// The channel of an agent.
    pub fn channel(&self, id: &AgentId) -> broadcast::Sender<Arc<str>> {
        let mut channels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A driver has a sender of its own, and a watcher a receiver.
        channels.retain(|_, channel| channel.strong_count() > 1 || channel.receiver_count() > 0);
        channels.entry(id.clone()).or_insert_with(live_channel).clone()
    }
}

/// The live updates of an agent, from this process or from the one that drives it.
pub struct LiveUpdates {
    service: AgentService,
    id: AgentId,
    here: broadcast::Receiver<Arc<str>>,
    elsewhere: Option<Lines<BufReader<UnixStream>>>,
}

impl AgentService {
    /// Watches an agent.
    pub fn watch(&self, id: &AgentId) -> LiveUpdates {
        let here = self.0.live.channel(id).subscribe();
        let mut updates = LiveUpdates { service: self.clone(), id: id.clone(), here, elsewhere: None };
        updates.look_elsewhere();
        updates
    }
}

impl LiveUpdates {
    /// Connects to the process that drives the agent, if it is another one. The caller asks again when the agent has new
    /// events: a driver of another process may have begun.
    pub fn look_elsewhere(&mut self) {
        if self.elsewhere.is_none() && !self.service.is_driven_here(&self.id) {
            self.elsewhere = watch_live(&self.service.agents().directory(&self.id));
        }
    }

    /// The next update, as JSON. It may be cancelled at any time.
    pub async fn next(&mut self) -> String {
        loop {
            let line = async {
                match &mut self.elsewhere {
                    Some(lines) => lines.next_line().await.ok().flatten(),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                update = self.here.recv() => match update {
                    Ok(update) => return update.to_string(),
                    Err(RecvError::Lagged(_)) => {}
                    // The channel is kept while it has a receiver.
                    Err(RecvError::Closed) => std::future::pending().await,
                },
                line = line => match line {
                    Some(line) => return line,
                    None => self.elsewhere = None,
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_channel_lives_as_long_as_it_is_used() {
        let channels = LiveChannels::default();
        let (one, other): (AgentId, AgentId) = ("a1".parse().unwrap(), "a2".parse().unwrap());
        let mut watcher = channels.channel(&one).subscribe();
        let driver = channels.channel(&one);
        driver.send("x".into()).unwrap();
        assert_eq!(&*watcher.recv().await.unwrap(), "x", "driver and watcher share the channel");
        drop(watcher);
        drop(channels.channel(&other));
        assert!(channels.0.lock().unwrap().contains_key(&one), "its driver runs");
        drop(driver);
        drop(channels.channel(&other));
        assert_eq!(channels.0.lock().unwrap().len(), 1, "only the one that was asked for last");
    }
}
