//! Attempts of one call: how many, and how long to wait between them.

use std::time::Duration;

use super::{Answer, ModelError, ModelProgress};

/// The bounds of the attempts of one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    /// The most attempts, at least one.
    pub attempts_max: u32,
    /// The wait after the first failure; it doubles with every failure.
    pub wait_first: Duration,
    /// The longest wait. A provider that asks for a longer one gets no further attempt.
    pub wait_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts_max: 6, wait_first: Duration::from_millis(500), wait_max: Duration::from_secs(120) }
    }
}

impl RetryPolicy {
    /// The wait before the next attempt, or none if there is no further one.
    ///
    /// `random` is evenly distributed in 0..1. A wait that the provider asked for is only ever lengthened.
    pub fn wait(&self, attempt: u32, error: &ModelError, random: f64) -> Option<Duration> {
        if attempt >= self.attempts_max || !error.is_retryable() {
            return None;
        }
        let doubled = self.wait_first.saturating_mul(1 << attempt.saturating_sub(1).min(20));
        match error.retry_after() {
            Some(asked) if asked > self.wait_max => None,
            Some(asked) => Some(asked + doubled.min(self.wait_max).mul_f64(random / 4.0)),
            None => Some(doubled.min(self.wait_max).mul_f64(0.5 + random / 2.0)),
        }
    }

    /// Makes attempts until one succeeds or the policy ends them, and reports each.
    pub async fn run<F>(
        &self,
        progress: &(dyn Fn(ModelProgress) + Send + Sync),
        mut make_attempt: impl FnMut(u32) -> F,
    ) -> Result<Answer, ModelError>
    where
        F: Future<Output = Result<Answer, ModelError>>,
    {
        let mut attempt = 1;
        loop {
            progress(ModelProgress::AttemptStarted { attempt });
            let error = match make_attempt(attempt).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let retry_after = self.wait(attempt, &error, random_fraction());
            progress(ModelProgress::AttemptFailed { attempt, error: error.clone(), retry_after });
            let Some(wait) = retry_after else { return Err(error) };
            tokio::time::sleep(wait).await;
            attempt += 1;
        }
    }
}

/// A number in 0..1; the middle if the kernel gives no random bytes, for a wait needs no secrecy.
fn random_fraction() -> f64 {
    let bytes: [u8; 4] = sys::random::bytes().unwrap_or([0, 0, 0, 128]);
    f64::from(u32::from_le_bytes(bytes)) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::model::{StopReason, TokenUsage};

    fn overloaded(retry_after: Option<Duration>) -> ModelError {
        ModelError::Overloaded { retry_after, message: String::new() }
    }

    #[test]
    fn waits_double_within_bounds_and_never_undercut_the_provider() {
        let policy = RetryPolicy {
            attempts_max: 10,
            wait_first: Duration::from_secs(1),
            wait_max: Duration::from_secs(60),
        };
        for attempt in 1..10 {
            let full = (1u64 << (attempt - 1)).min(60);
            for random in [0.0, 0.5, 0.999] {
                let wait = policy.wait(attempt, &overloaded(None), random).unwrap().as_secs_f64();
                assert!(wait >= full as f64 / 2.0 && wait <= full as f64, "{attempt}: {wait}");
                let asked = Duration::from_secs(7);
                let wait = policy.wait(attempt, &overloaded(Some(asked)), random).unwrap();
                assert!(wait >= asked && wait <= asked + Duration::from_secs(15), "{attempt}: {wait:?}");
            }
        }
        assert_eq!(policy.wait(10, &overloaded(None), 0.0), None, "the attempts are used up");
        assert_eq!(policy.wait(1, &overloaded(Some(Duration::from_secs(61))), 0.0), None, "too long a wait");
        let fatal = ModelError::ContextOverflow { message: String::new() };
        assert_eq!(policy.wait(1, &fatal, 0.0), None, "no retry helps");
    }

    #[tokio::test(start_paused = true)]
    async fn every_attempt_is_reported_and_the_last_error_is_returned() {
        let policy = RetryPolicy { attempts_max: 3, ..RetryPolicy::default() };
        let log = Mutex::new(Vec::new());
        let note = |progress: ModelProgress| {
            let line = match progress {
                ModelProgress::AttemptStarted { attempt } => format!("start {attempt}"),
                ModelProgress::AttemptFailed { attempt, error, retry_after } => {
                    format!("failed {attempt} {} again={}", error.kind(), retry_after.is_some())
                }
                ModelProgress::Delta(_) => "delta".to_owned(),
            };
            log.lock().unwrap().push(line);
        };
        let answer = Answer {
            blocks: Vec::new(),
            stop: StopReason::EndTurn,
            usage: TokenUsage::default(),
            model: "m".to_owned(),
        };
        let result = policy
            .run(&note, |attempt| {
                let answer = answer.clone();
                async move { if attempt < 3 { Err(overloaded(None)) } else { Ok(answer) } }
            })
            .await;
        assert_eq!(result.as_ref(), Ok(&answer));
        let result = policy.run(&note, |_| async { Err(overloaded(None)) }).await;
        assert_eq!(result, Err(overloaded(None)));
        let failed = |attempt, again| format!("failed {attempt} overloaded again={again}");
        let start = |attempt| format!("start {attempt}");
        let expected = [
            [start(1), failed(1, true), start(2), failed(2, true), start(3)].to_vec(),
            [start(1), failed(1, true), start(2), failed(2, true), start(3), failed(3, false)].to_vec(),
        ];
        assert_eq!(*log.lock().unwrap(), expected.concat());
    }
}
