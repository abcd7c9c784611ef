//! The proxy's socket in the Body: programs ask it for a tunnel (CONNECT) or for a page over plain HTTP, and the guest
//! of a microVM sends it redirected connections and DNS messages. Clients of ssh speak to it as to an agent.

use std::{cell::RefCell, future::Future, io, rc::Rc, sync::Arc, time::Duration};

use proto::egress::{Decision, Policy, RESOLVER};
use tokio::{
    io::AsyncWriteExt,
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use vault::SealKey;

use crate::{
    budgets::{BudgetTable, RecordedBytes},
    client::ProxyClient,
    connection::ConnectionOrigin,
    corporate::CorporateProxy,
    flows::FlowTable,
    http_head::HttpRequest,
    inspect::Certificates,
    journal::Journal,
    name_cache::NameCache,
    names::NameTable,
    peers::PeerTable,
    questions::Questions,
    refusal::{Denial, RefusalForm},
    secrets::SecretTable,
    ssh_agent::SshAgent,
    supervisor::SupervisorLink,
    target::Target,
};

/// The pause after a failed accept, most often for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections at once; further ones wait.
pub const CONNECTIONS_MAX: usize = 512;

const SIGNING_MAX: usize = 4;

/// The state that all connections of one Body share.
pub struct Proxy {
    pub policy: RefCell<Policy>,
    /// The number of the policy.
    pub generation: std::cell::Cell<u64>,
    pub journal: Rc<RefCell<Journal>>,
    /// The budgets of the rules.
    pub budgets: Rc<BudgetTable>,
    /// The addresses that stand for names.
    pub names: RefCell<NameTable>,
    /// The addresses that names resolve to.
    pub addresses: NameCache,
    /// The connections that are open.
    pub flows: Rc<FlowTable>,
    /// The connections that may still be opened.
    pub free: Arc<Semaphore>,
    /// The secrets that the Body may use.
    pub secrets: RefCell<Rc<SecretTable>>,
    /// The keys of ssh that the Body may use.
    pub ssh: SshAgent,
    /// The certificates of inspected connections.
    pub certificates: Certificates,
    /// The requests whose bodies may be held at once for a signature.
    pub signing: Semaphore,
    /// The connections that wait for a decision.
    pub questions: Questions,
    /// The key that opens the sealed parts of orders.
    pub key: Option<SealKey>,
    /// The other Bodies that may connect, and their connections.
    pub peers: PeerTable,
    /// The proxy of the operator's network, if hosts are reached through it.
    pub corporate: RefCell<Option<Rc<CorporateProxy>>>,
    /// The supervisor, which opens connections from Body to Body.
    pub link: Rc<SupervisorLink>,
}

impl Proxy {
    /// A proxy without connections, whose rules have spent nothing.
    #[cfg(test)]
    pub fn new(policy: Policy, generation: u64, journal: Journal, names: NameTable) -> Self {
        Self::with_spent(policy, generation, journal, names, RecordedBytes::default())
    }

    /// A proxy without connections, whose rules have spent some of their budgets.
    pub fn with_spent(
        policy: Policy,
        generation: u64,
        journal: Journal,
        names: NameTable,
        recorded: RecordedBytes,
    ) -> Self {
        let (journal, flows) = (Rc::new(RefCell::new(journal)), Rc::new(FlowTable::default()));
        let budgets = Rc::new(BudgetTable::new(Rc::clone(&journal), Rc::clone(&flows), recorded));
        Self {
            policy: RefCell::new(policy),
            generation: generation.into(),
            journal,
            budgets,
            names: RefCell::new(names),
            addresses: NameCache::default(),
            flows,
            free: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            secrets: RefCell::default(),
            ssh: SshAgent::default(),
            certificates: Certificates::new(None),
            signing: Semaphore::new(SIGNING_MAX),
            questions: Questions::default(),
            key: None,
            peers: PeerTable::default(),
            corporate: RefCell::default(),
            link: Rc::new(SupervisorLink::none()),
        }
    }

    /// Serves the connections of the proxy's socket forever.
    pub async fn serve(self: Rc<Self>, listener: UnixListener) {
        accept_all(
            &self.free,
            || listener.accept(),
            |(stream, _)| {
                let proxy = Rc::clone(&self);
                async move { proxy.connection(stream).await }
            },
        )
        .await;
    }

    /// Serves one connection: one request, and then a tunnel, an answer or the end.
    pub async fn connection(self: &Rc<Self>, stream: UnixStream) -> io::Result<()> {
        let mut client = ProxyClient::new(stream);
        if self.is_agent_client(&mut client).await? {
            return self.serve_agent(client).await;
        }
        let request = client.read_head().await?.and_then(|head| HttpRequest::parse(&head));
        let request = match request {
            Ok(request) => request,
            Err(denial) => return self.deny(&mut client, RefusalForm::Http, "?", denial).await,
        };
        if request.tunnel() == Some(RESOLVER) {
            client.stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
            return self.resolve_stream(&mut client).await;
        }
        let (text, origin) = match request.tunnel().map(str::to_owned) {
            Some(target) => (target, ConnectionOrigin::Tunnel),
            None => match request.forward() {
                Ok(target) => (target, ConnectionOrigin::Forward(request)),
                Err(denial) => return self.deny(&mut client, RefusalForm::Http, "?", denial).await,
            },
        };
        let target = Target::parse(&text, &self.names.borrow());
        match target {
            Ok(target) => self.connect(client, &target, &origin).await,
            Err(why) => self.deny(&mut client, RefusalForm::Http, &text, Denial::forbidden(why)).await,
        }
    }

    /// Records a decision.
    pub fn record(&self, decision: Decision) -> io::Result<()> {
        self.journal.borrow_mut().record(decision)
    }
}

/// Accepts connections forever, and serves each in a task of its own.
pub async fn accept_all<T, A, S>(free: &Arc<Semaphore>, accept: impl Fn() -> A, serve: impl Fn(T) -> S)
where
    A: Future<Output = io::Result<T>>,
    S: Future<Output = io::Result<()>> + 'static,
{
    loop {
        let Ok(turn) = free.clone().acquire_owned().await else { return };
        match accept().await {
            Ok(accepted) => {
                let served = serve(accepted);
                tokio::task::spawn_local(async move {
                    let _ = served.await;
                    drop(turn);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
pub mod tests;
