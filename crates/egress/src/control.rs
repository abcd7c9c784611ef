//! Orders of `pal` to a running proxy: another policy, or a question about its state.
//!
//! Invariant: orders that cannot be used change nothing. Orders that can be used hold from the next decision on, and
//! connections that they do not permit are closed before `pal` has its answer.
//! Trust: the socket is in a directory that the Body does not see; still a message has a maximum length and a deadline.

use std::{io, rc::Rc, sync::Arc, time::Duration};

use proto::egress::{EgressControl, EgressOrders, EgressReply, MESSAGE_LEN_MAX};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};

use crate::{
    corporate::CorporateProxy,
    peers::PeerTable,
    proxy::{Proxy, accept_all},
    secrets::SecretTable,
};

/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two looks at the windows of rules.
const WINDOW_PAUSE: Duration = Duration::from_secs(20);
/// Messages at once; further ones wait.
const STREAMS_MAX: usize = 8;

impl Proxy {
    /// Serves control messages forever.
    pub async fn serve_control(self: Rc<Self>, listener: UnixListener) {
        let free = Arc::new(Semaphore::new(STREAMS_MAX));
        accept_all(&free, || listener.accept(), |(stream, _)| {
            let proxy = Rc::clone(&self);
            async move { timeout(PATIENCE, proxy.control(stream)).await.map_err(|_| io::ErrorKind::TimedOut)? }
        })
        .await;
    }

    async fn control(&self, mut stream: UnixStream) -> io::Result<()> {
        let mut line = Vec::new();
        let mut reader = BufReader::new(&mut stream).take(MESSAGE_LEN_MAX);
        reader.read_until(b'\n', &mut line).await?;
        // A line without its end may be a part of other orders.
        let message = line.strip_suffix(b"\n").ok_or("the message is too long, or incomplete".to_owned());
        let message = message.and_then(|line| {
            serde_json::from_slice(line).map_err(|error| format!("the message cannot be read: {error}"))
        });
        let reply = message.and_then(|message| self.obey(&message));
        let reply = reply.unwrap_or_else(|why| EgressReply::Refused { why });
        let mut text = serde_json::to_vec(&reply)?;
        text.push(b'\n');
        stream.write_all(&text).await
    }

    /// Follows a message, or returns the reason why nothing changes.
    pub fn obey(&self, message: &EgressControl) -> Result<EgressReply, String> {
        let closed = match message {
            EgressControl::Status => 0,
            EgressControl::Replace(orders) => self.replace(orders)?,
        };
        Ok(EgressReply::State {
            generation: self.generation.get(),
            open: self.flows.len() + self.peers.len(),
            closed,
        })
    }

    /// Puts another policy in force, and returns how many connections it closed.
    fn replace(&self, orders: &EgressOrders) -> Result<usize, String> {
        let policy = orders.policy().map_err(|error| error.to_string())?;
        let accept = PeerTable::read(orders)?;
        let corporate = CorporateProxy::open(orders.corporate_proxy.as_ref(), self.key.as_ref())?;
        let current = self.generation.get();
        if orders.generation < current {
            return Err(format!("the policy in force has the number {current}, which is newer"));
        }
        self.certificates.set_authority(orders.authority.as_ref(), self.key.as_ref())?;
        *self.secrets.borrow_mut() = Rc::new(SecretTable::open(&orders.secrets, self.key.as_ref()));
        *self.corporate.borrow_mut() = corporate;
        self.ssh.set(&orders.ssh_keys, self.key.as_ref());
        self.journal.borrow_mut().set_flush(orders.flush);
        self.generation.set(orders.generation);
        let closed = self.flows.close_denied(&policy) + self.peers.replace(orders.body.clone(), accept);
        *self.policy.borrow_mut() = policy;
        self.questions.policy_changed();
        Ok(closed)
    }
}

impl Proxy {
    /// Closes connections whose rule's window has ended, forever.
    pub async fn close_outside_windows(self: Rc<Self>) {
        loop {
            tokio::time::sleep(WINDOW_PAUSE).await;
            self.flows.close_denied(&self.policy.borrow());
        }
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
