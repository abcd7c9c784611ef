//! The budgets of rules: how often they allow, and how many bytes go through in both directions.
//!
//! Invariant: bytes are in the spool as spent before they are forwarded, in steps of a sixteenth of the budget. A process
//! that replaces this one reads them there, so the end of a process gives nothing back; it may take the rest of a step.
//! Direction of failure: bytes that cannot be recorded are not forwarded, and their connection ends.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    fmt, io,
    rc::Rc,
    time::SystemTime,
};

use proto::egress::{Decision, DecisionKind, PermitTerms, RuleBudget, SpoolLine};
use tokio::time::Instant;

use crate::{flows::FlowTable, journal::Journal, refusal::Denial};

/// The parts of a budget of bytes that are recorded one by one.
const STEPS: u64 = 16;

/// The spent parts of the budgets of one Body.
pub struct BudgetTable {
    journal: Rc<RefCell<Journal>>,
    flows: Rc<FlowTable>,
    states: RefCell<HashMap<String, Rc<BudgetState>>>,
}

#[derive(Default)]
struct BudgetState {
    bytes: Cell<u64>,
    /// The bytes that the spool has as spent.
    recorded: Cell<u64>,
    /// The times at which the rule allowed a connection or a request in its last period.
    admitted: RefCell<VecDeque<Instant>>,
}

/// The bytes that the spool of a Body has as spent, by the key of their budget.
#[derive(Debug, Default)]
pub struct RecordedBytes(HashMap<String, u64>);

/// Counts the bytes of one connection or request, and ends it when its rule no longer allows it.
pub struct Meter(Option<MeteredRule>);

struct MeteredRule {
    table: Rc<BudgetTable>,
    terms: PermitTerms,
    state: Option<Rc<BudgetState>>,
}

/// The end of a connection or a request whose rule no longer allows it. The reason is recorded.
#[derive(Debug)]
pub struct AllowanceEnd(String);

impl fmt::Display for AllowanceEnd {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for AllowanceEnd {}

/// Whether a connection failed because its rule no longer allows it.
pub fn is_allowance_end(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<AllowanceEnd>())
}

impl RecordedBytes {
    /// Notes a line of the spool. The last one about a budget counts.
    pub fn note(&mut self, line: &SpoolLine) {
        if let (DecisionKind::Spent, Some(spent)) = (line.kind, &line.data.spent) {
            self.0.insert(spent.key.clone(), spent.bytes);
        }
    }
}

impl BudgetTable {
    /// The budgets, of which earlier processes spent what they recorded.
    pub fn new(journal: Rc<RefCell<Journal>>, flows: Rc<FlowTable>, recorded: RecordedBytes) -> Self {
        let state = |bytes: u64| BudgetState {
            bytes: bytes.into(),
            recorded: bytes.into(),
            ..BudgetState::default()
        };
        let states = recorded.0.into_iter().map(|(key, bytes)| (key, Rc::new(state(bytes)))).collect();
        Self { journal, flows, states: RefCell::new(states) }
    }

    /// Counts a connection or a request that a rule allows, or returns the reason why its budget does not.
    pub fn admit(self: &Rc<Self>, terms: &PermitTerms) -> Result<Meter, Denial> {
        if *terms == PermitTerms::default() {
            return Ok(Meter::unlimited());
        }
        let state = match &terms.budget {
            None => None,
            Some(budget) => {
                let state = Rc::clone(self.states.borrow_mut().entry(budget.key.clone()).or_default());
                state.admit(budget)?;
                Some(state)
            }
        };
        Ok(Meter(Some(MeteredRule { table: Rc::clone(self), terms: terms.clone(), state })))
    }

    fn record(&self, budget: &RuleBudget, state: &BudgetState, bytes: u64) -> io::Result<()> {
        self.journal.borrow_mut().record_spent(&Decision::spent(budget, bytes))?;
        state.recorded.set(bytes);
        Ok(())
    }

    /// Records why a connection ends that was open.
    fn end(&self, rule: &str, why: String) -> io::Error {
        // The connection ends either way.
        let _ = self.journal.borrow_mut().record(Decision::denied(rule, &why));
        io::Error::other(AllowanceEnd(why))
    }
}

impl BudgetState {
    fn admit(&self, budget: &RuleBudget) -> Result<(), Denial> {
        if budget.bytes.as_ref().is_some_and(|max| self.bytes.get() >= max.bytes) {
            return Err(Denial::forbidden(spent(budget)));
        }
        let Some(rate) = &budget.rate else { return Ok(()) };
        let now = Instant::now();
        let mut admitted = self.admitted.borrow_mut();
        while admitted.front().is_some_and(|first| now.duration_since(*first) >= rate.period) {
            admitted.pop_front();
        }
        if admitted.len() >= rate.count as usize {
            return Err(Denial::too_many(format!(
                "the rule `{}` has spent its rate of {}",
                budget.rule, rate.text
            )));
        }
        admitted.push_back(now);
        Ok(())
    }
}

fn spent(budget: &RuleBudget) -> String {
    let max = budget.bytes.as_ref().map_or("", |max| &max.text);
    format!("the rule `{}` has spent its budget of {max}", budget.rule)
}

impl Meter {
    /// Counts nothing, and ends nothing.
    pub fn unlimited() -> Self {
        Self(None)
    }

    /// Counts bytes that are about to be forwarded. After an error they must not be.
    pub fn spend(&self, len: usize) -> io::Result<()> {
        let Some(MeteredRule { table, terms, state }) = &self.0 else { return Ok(()) };
        if let Some(window) = terms.window.as_ref().filter(|window| !window.has(SystemTime::now())) {
            return Err(table.end("?", format!("the window {} (UTC) of its rule is over", window.text())));
        }
        let (Some(budget), Some(state)) = (&terms.budget, state) else { return Ok(()) };
        let Some(max) = budget.bytes.as_ref().map(|max| max.bytes) else { return Ok(()) };
        let bytes = state.bytes.get().saturating_add(len as u64);
        if bytes > max {
            // The rest is too small for what a program sends at once, so it is spent, too.
            state.bytes.set(max);
            if state.recorded.get() < max {
                table.record(budget, state, max)?;
            }
            table.flows.close_spent(&budget.key);
            return Err(table.end(&budget.rule, spent(budget)));
        }
        if bytes > state.recorded.get() {
            let step = (max / STEPS).max(1);
            table.record(budget, state, bytes.next_multiple_of(step).min(max))?;
        }
        state.bytes.set(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, time::Duration};

    use proto::egress::{EgressRule, Flush, Policy, RuleLimit};

    use super::*;
    use crate::journal::tests::{lines, spool};

    fn table(spool: &File) -> Rc<BudgetTable> {
        let mut recorded = RecordedBytes::default();
        lines(spool).iter().for_each(|line| recorded.note(line));
        let journal = Journal::new(spool.try_clone().unwrap(), Flush::Kernel);
        Rc::new(BudgetTable::new(Rc::new(RefCell::new(journal)), Rc::default(), recorded))
    }

    fn terms(rate: Option<&str>, bytes: Option<&str>, window: Option<&str>) -> PermitTerms {
        let limit = RuleLimit { rate: rate.map(str::to_owned), bytes: bytes.map(str::to_owned) };
        let limit = (limit != RuleLimit::default()).then_some(limit);
        let rule = EgressRule { limit, window: window.map(str::to_owned), ..EgressRule::allow("a.test:443") };
        // The terms are the same at any time; this one is in every window of the tests.
        Policy::new(&[rule]).unwrap().at(SystemTime::UNIX_EPOCH).judge_name("a.test", 443).unwrap().terms
    }

    #[test]
    fn bytes_are_recorded_before_they_go_and_a_restart_gives_none_back() {
        let file = spool();
        let terms = terms(None, Some("1MiB"), None);
        let step = 1 << 16;
        let recorded = || {
            lines(&file).iter().filter_map(|line| Some(line.data.spent.as_ref()?.bytes)).collect::<Vec<_>>()
        };
        let meter = table(&file).admit(&terms).unwrap();
        meter.spend(1).unwrap();
        meter.spend(step - 1).unwrap();
        assert_eq!(recorded(), [step as u64]);
        meter.spend(1).unwrap();
        assert_eq!(recorded(), [step as u64, 2 * step as u64]);
        // As if the process were killed: the rest of the step is gone.
        let again = table(&file).admit(&terms).unwrap();
        again.spend(14 * step).unwrap();
        assert_eq!(recorded().last(), Some(&(16 * step as u64)));
        let why = again.spend(1).unwrap_err();
        assert!(is_allowance_end(&why), "{why}");
        assert_eq!(why.to_string(), "the rule `allow a.test:443` has spent its budget of 1MiB");
        let denial = table(&file).admit(&terms).err().unwrap();
        assert_eq!((denial.status, denial.why), (403, why.to_string()));
        assert_eq!(lines(&file).last().unwrap().data.why, why.to_string(), "the end is in the log");
        assert!(recorded().len() <= 17);
        // Another budget for the same targets has the same bytes behind it.
        let more = self::terms(None, Some("2MiB"), None);
        table(&file).admit(&more).unwrap().spend(1 << 20).unwrap();
    }

    #[test]
    fn bytes_that_cannot_be_recorded_do_not_go() {
        let full = File::options().append(true).open("/dev/full").unwrap();
        let journal = Rc::new(RefCell::new(Journal::new(full, Flush::Kernel)));
        let table = Rc::new(BudgetTable::new(journal, Rc::default(), RecordedBytes::default()));
        let meter = table.admit(&terms(None, Some("1MiB"), None)).unwrap();
        assert!(meter.spend(1).is_err() && meter.spend(1).is_err());
        assert!(table.admit(&terms(Some("1/s"), None, None)).unwrap().spend(1).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_allows_so_many_in_any_period() {
        let (file, terms) = (spool(), terms(Some("3/min"), None, None));
        let table = table(&file);
        let admits = || table.admit(&terms).map(drop);
        let wait = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
        admits().unwrap();
        wait(50).await;
        assert_eq!((admits(), admits()), (Ok(()), Ok(())));
        let denial = admits().unwrap_err();
        assert_eq!(denial.status, 429);
        assert_eq!(denial.why, "the rule `allow a.test:443` has spent its rate of 3/min");
        wait(10).await;
        admits().unwrap();
        assert!(admits().is_err(), "the other two are in the last minute");
        wait(60).await;
        assert_eq!((admits(), admits(), admits()), (Ok(()), Ok(()), Ok(())));
    }

    #[test]
    fn nothing_goes_on_when_a_window_is_over() {
        let file = spool();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 60 % 1440;
        let at = |minute: u64| format!("{:02}:{:02}", minute % 1440 / 60, minute % 60);
        let over = format!("00:00-{}", if now == 0 { "00:01".into() } else { at(now) });
        if now > 1 {
            let over = table(&file).admit(&terms(None, None, Some(&over))).unwrap().spend(1).unwrap_err();
            assert!(is_allowance_end(&over) && over.to_string().contains("is over"), "{over}");
        }
        table(&file).admit(&terms(None, None, Some("00:00-24:00"))).unwrap().spend(1).unwrap();
    }
}
