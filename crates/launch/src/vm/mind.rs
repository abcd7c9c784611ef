//! Minding a machine: from the start of its hypervisor to its end.

use std::{
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use guest::channel::{Channel, LineError, Port, Told};
use proto::{
    mux::{FrameKind, Side},
    vm::{
        Accelerator, BOARD, Begin, CLOCK_OFFSET_MAX_MS, Receipt, Revival, VmPlan, Welcome, clock_offset_ms,
    },
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
    task::LocalSet,
};

use super::{
    Charge,
    beside::Beside,
    engine::{self, Engine},
    save,
    share::Sharers,
};
use crate::report::{Step, StepError};

/// How long a machine that was thawed may take to answer.
const THAW_PATIENCE: Duration = Duration::from_secs(20);
/// A host that is busy with others gives a machine little of its processors: time in which it wanted one and had none
/// is not counted, up to so many times what it may take.
const BUSY_MAX: u32 = 6;
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// An emulated kernel that does not come up the first time is started once more: its clock sometimes fails to be
/// calibrated.
const BOOTS_MAX: u32 = 2;
/// How long its hypervisor may take to end after its guest said goodbye.
const BYE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a machine is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// Its guest said goodbye.
    InOrder,
    /// Its hypervisor is gone.
    Hypervisor,
    /// Its guest broke a rule.
    Violation,
    /// It stopped without a word.
    Silent,
    /// Its hypervisor cannot be asked.
    Monitor,
    /// Who shares a directory with it is gone.
    Sharer,
}

impl Over {
    fn code(self) -> i32 {
        match self {
            Over::InOrder => 0,
            Over::Hypervisor => 71,
            Over::Violation => 72,
            Over::Silent => 73,
            Over::Monitor => 74,
            Over::Sharer => 75,
        }
    }
}

/// A word that came over the line, or its end.
pub(super) type Words = mpsc::Receiver<Result<(FrameKind, Vec<u8>), LineError>>;

/// A machine whose guest answers.
pub(super) struct Machine {
    pub(super) vm: VmPlan,
    pub(super) channel: Rc<Channel>,
    pub(super) words: Words,
    pub(super) engine: Box<dyn Engine>,
    /// Answers to `Hold` that nobody waited for to the end, and that may still come.
    pub(super) late: u32,
}

pub fn live(charge: Charge, tell: impl FnOnce(Result<Revival, StepError>)) -> i32 {
    let _ = sys::process::set_name(c"pal-vm");
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_millis(500))
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(Err(error).step("prepare to mind the machine"));
            return 1;
        }
    };
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let Charge { vm, callers, control, sharers, jailer } = charge;
        let mut sharers = Sharers::of(sharers);
        let (callers, control) = match listen(callers).and_then(|callers| Ok((callers, listen(control)?))) {
            Ok(listening) => listening,
            Err(error) => {
                tell(Err(error).step("listen for callers"));
                return 1;
            }
        };
        let brought_up = tokio::select! {
            up = bring_up(vm, jailer, &control) => up,
            why = sharers.gone() => Err(StepError::new("share a directory with the machine", why)),
        };
        let (mut machine, revival) = match brought_up {
            Ok(up) => up,
            Err(error) => {
                tell(Err(error));
                return 1;
            }
        };
        match machine.engine.process().handle().step("follow the hypervisor") {
            Ok(handle) => {
                tell(Ok(revival));
                tokio::select! {
                    over = mind(&mut machine, handle, callers, control) => over.code(),
                    why = sharers.gone() => {
                        complain(&format!("virtiofsd is gone: {why}"));
                        Over::Sharer.code()
                    }
                }
            }
            Err(error) => {
                tell(Err(error));
                1
            }
        }
    })
}

fn listen(listener: std::os::unix::net::UnixListener) -> io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Starts the machine and waits for its guest.
async fn bring_up(
    vm: VmPlan,
    mut jailer: Option<Beside>,
    control: &UnixListener,
) -> Result<(Machine, Revival), StepError> {
    // Who shares directories is there for one hypervisor.
    let boots = matches!(vm.begin, Begin::Boot { .. })
        && vm.accelerator == Accelerator::Emulated
        && vm.shares.is_empty();
    let mut attempt = 1;
    loop {
        match try_once(vm.clone(), jailer.take(), control).await {
            Err(Failure { silent: true, .. }) if boots && attempt < BOOTS_MAX => attempt += 1,
            outcome => return outcome.map_err(|failure| failure.error),
        }
    }
}

struct Failure {
    error: StepError,
    /// The machine runs, but says nothing.
    silent: bool,
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        Self { error, silent: false }
    }
}

async fn try_once(
    mut vm: VmPlan,
    jailer: Option<Beside>,
    control: &UnixListener,
) -> Result<(Machine, Revival), Failure> {
    let mut began = Instant::now();
    // A copy of a process cannot begin before there is one; others wait when they have begun.
    if matches!(vm.begin, Begin::Thaw { imprint: Some(_), .. }) {
        began = wait_for_parent(&mut vm, control).await?.unwrap_or(began);
    }
    let mut engine = engine::start(&vm, jailer).await?;
    began = wait_for_parent(&mut vm, control).await?.unwrap_or(began);
    let (how, patience) = match &vm.begin {
        Begin::Boot { .. } => ("boot", Duration::from_millis(vm.boot_ms_max)),
        Begin::Thaw { .. } => ("thaw", THAW_PATIENCE),
    };
    let line = match engine.begin(&vm).await {
        Ok(line) => line,
        Err(error) if how == "thaw" => {
            return Err(incomplete(&format!("its hypervisor cannot go on with it: {error}")).into());
        }
        Err(error) => return Err(unheard(engine.as_mut(), error).await),
    };
    let channel = Channel::new(Side::Host, Port::new(line).step("open the line to the machine")?);
    let writing = channel.clone();
    tokio::task::spawn_local(async move { drop(writing.write().await) });
    let words = follow(&channel);
    let mut machine = Machine { vm, channel, words, engine, late: 0 };
    if how == "boot"
        && let Err(error) = machine.first_word(FrameKind::Here, patience).await
    {
        return Err(unheard(machine.engine.as_mut(), error).await);
    }
    let revival = match machine.welcome(how, patience, began).await {
        Ok(revival) => revival,
        Err(error) if how == "thaw" => {
            return Err(incomplete(&format!("its guest does not answer: {error}")).into());
        }
        Err(error) => return Err(unheard(machine.engine.as_mut(), error).await),
    };
    match missing(&machine.vm, &revival) {
        Some(what) if how == "thaw" => Err(incomplete(&what).into()),
        Some(what) => Err(StepError::new("bring the machine up", what).into()),
        None => Ok((machine, revival)),
    }
}

/// Where what the machine is to be thawed from is not there yet, waits for it, and tells when it was.
async fn wait_for_parent(vm: &mut VmPlan, control: &UnixListener) -> Result<Option<Instant>, StepError> {
    let Begin::Thaw { held: held @ None, .. } = &mut vm.begin else { return Ok(None) };
    *held =
        Some(save::wait(control).await.map_err(|error| {
            incomplete(&format!("what it is to be thawed from never came to be: {error}"))
        })?);
    Ok(Some(Instant::now()))
}

/// What a receipt does not prove.
pub(super) fn missing(vm: &VmPlan, revival: &Revival) -> Option<String> {
    let Revival { receipt, clock_offset_ms, .. } = revival;
    if receipt.body != vm.welcome.config.body {
        return Some("its guest takes itself for another Body's".to_owned());
    }
    if receipt.generation != vm.welcome.generation {
        return Some(format!(
            "its guest is of generation {}, not {}",
            receipt.generation, vm.welcome.generation
        ));
    }
    if !receipt.tree.is_sound() {
        return Some("its guest does not say what its files are".to_owned());
    }
    if !receipt.reseeded {
        return Some(format!("its kernel took no fresh randomness: {}", told(receipt)));
    }
    if clock_offset_ms.abs() > CLOCK_OFFSET_MAX_MS {
        return Some(format!("its clock is {clock_offset_ms} ms off"));
    }
    match &vm.begin {
        // Where processes went on meanwhile, they may have changed files of their own.
        Begin::Thaw { held: Some(held), .. } if held.still && held.tree != receipt.tree => {
            Some("its files are not those it was frozen with".to_owned())
        }
        _ => None,
    }
}

fn told(receipt: &Receipt) -> String {
    proto::text::visible(&receipt.trouble.join("; ").chars().take(400).collect::<String>())
}

/// The words of a line, as they come; streams look after themselves.
fn follow(channel: &Rc<Channel>) -> Words {
    let (words, heard) = mpsc::channel(16);
    let channel = channel.clone();
    tokio::task::spawn_local(async move {
        loop {
            let told = match channel.read().await {
                Ok(Told::Word(kind, contents)) => Ok((kind, contents)),
                // A guest opens no streams; the line would have ended.
                Ok(Told::Opened(_)) => continue,
                Err(error) => Err(error),
            };
            let over = told.is_err();
            if words.send(told).await.is_err() || over {
                return;
            }
        }
    });
    heard
}

/// Time and randomness of this very moment.
fn fresh(welcome: &Welcome) -> io::Result<Welcome> {
    let drawn: [u8; 64] = sys::random::bytes()?;
    Ok(Welcome { now_ns: now_ns(), entropy: proto::event::hex(&drawn), ..welcome.clone() })
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// A machine that did not come up, with the last it said.
async fn unheard(engine: &mut dyn Engine, error: io::Error) -> Failure {
    let silent = error.kind() == io::ErrorKind::TimedOut;
    let console = engine.console().await.unwrap_or_default();
    let cause = match (silent, console.is_empty()) {
        (_, false) => format!("its console ends with: {console}"),
        (true, true) => "its kernel says nothing".to_owned(),
        (false, true) => error.to_string(),
    };
    let error = StepError::new("boot the machine", cause);
    Failure {
        error: error.hint("is the kernel one for virtual machines? see what is set up: pal doctor"),
        silent,
    }
}

fn incomplete(what: &str) -> StepError {
    StepError::new("thaw the machine", format!("{}: {what}", proto::failure::RESTORE_INCOMPLETE))
}

impl Machine {
    /// Waits for a word; others that come first are of no interest.
    pub(super) async fn word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        let heard = async {
            loop {
                match self.words.recv().await {
                    Some(Ok((kind, contents))) if kind == wanted => return Ok(contents),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(io::Error::other(error)),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
        };
        tokio::time::timeout(patience, heard).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Tells its guest who it is from now on, and hears what that proves.
    pub(super) async fn welcome(
        &mut self,
        how: &str,
        patience: Duration,
        began: Instant,
    ) -> io::Result<Revival> {
        let mut welcome = fresh(&self.vm.welcome)?;
        if matches!(self.vm.begin, Begin::Thaw { .. }) {
            // Its files are there; what it need not hear it need not understand.
            welcome.seeds = Vec::new();
            welcome.images = Vec::new();
        }
        if self.vm.hurried {
            // Ahead of what takes long to understand.
            self.channel.say(FrameKind::Rehearse, &[]).await;
        }
        self.channel.say(FrameKind::Welcome, &serde_json::to_vec(&welcome)?).await;
        let word = self.first_word(FrameKind::Receipt, patience).await?;
        let receipt = serde_json::from_slice::<Receipt>(&word)?.tidy();
        Ok(Revival {
            how: how.to_owned(),
            clock_offset_ms: clock_offset_ms(&receipt, welcome.now_ns, now_ns()),
            took_ms: began.elapsed().as_millis() as u64,
            board: BOARD,
            copied: self.engine.is_copy(),
            receipt,
        })
    }

    /// Waits for a word of a machine that comes up, until it has had the time that it may take.
    async fn first_word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        let (began, before) = (Instant::now(), self.engine.process().busy());
        let (mut looked, mut willing) = (began, Duration::ZERO);
        loop {
            match self.word(wanted, LOOK_EVERY).await {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                heard => return heard,
            }
            let since = looked.elapsed();
            looked += since;
            let process = self.engine.process();
            if process.wants_processor() {
                willing += since;
            }
            let starved = willing.saturating_sub(process.busy().saturating_sub(before));
            if began.elapsed() > patience * BUSY_MAX || began.elapsed().saturating_sub(starved) > patience {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Its guest said goodbye: the hypervisor follows.
    async fn settle(&mut self) {
        let _ = tokio::time::timeout(BYE_PATIENCE, self.engine.stop()).await;
        let deadline = Instant::now() + BYE_PATIENCE;
        while self.engine.process().ended().is_none() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Joins callers to the guest until the machine is over.
async fn mind(machine: &mut Machine, handle: OwnedFd, callers: UnixListener, control: UnixListener) -> Over {
    let Ok(gone) = guest::channel::readable(handle) else { return Over::Monitor };
    let channel = machine.channel.clone();
    tokio::task::spawn_local(async move {
        loop {
            match callers.accept().await {
                Ok((socket, _)) => drop(channel.open(socket).await),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    });
    loop {
        tokio::select! {
            word = machine.words.recv() => match word {
                Some(Ok((FrameKind::Bye, _))) => {
                    machine.settle().await;
                    return Over::InOrder;
                }
                // Somebody gave up waiting for it.
                Some(Ok((FrameKind::Held, _))) => machine.late = machine.late.saturating_sub(1),
                Some(Ok(_)) => {}
                Some(Err(LineError::Violation(violation))) => {
                    complain(&format!("the guest broke a rule: {violation}"));
                    return Over::Violation;
                }
                Some(Err(LineError::Broken(_))) | None => {
                    machine.settle().await;
                    return if ended_by_signal(machine) { Over::Hypervisor } else { Over::Silent };
                }
            },
            _ = gone.readable() => return if ended_by_signal(machine) { Over::Hypervisor } else { Over::Silent },
            asked = control.accept() => {
                if let Ok((socket, _)) = asked && let Err(error) = answer(machine, socket).await {
                    complain(&format!("the machine cannot go on after it was frozen: {error}"));
                    return Over::Monitor;
                }
            }
        }
    }
}

fn ended_by_signal(machine: &mut Machine) -> bool {
    machine.engine.process().ended().is_none_or(|status| status.exit_status() != Some(0))
}

async fn answer(machine: &mut Machine, socket: UnixStream) -> io::Result<()> {
    save::answer(machine, socket).await
}

/// To the Body's log.
fn complain(what: &str) {
    let _ = io::Write::write_all(&mut io::stderr(), format!("pal-vm: {what}\n").as_bytes());
}
