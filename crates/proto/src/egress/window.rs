//! The times of the week at which a rule counts.
//!
//! All times are UTC: the egress process is confined and has no files of time zones.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY_MINUTES: u32 = 24 * 60;
const WEEK_MINUTES: u32 = 7 * DAY_MINUTES;
const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
/// The day of the week of 1970-01-01, counted from Monday.
const FIRST_DAY: u64 = 3;

/// Some hours on some days of each week.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleWindow {
    /// Whether it begins on each day of the week.
    days: [bool; 7],
    /// The minute of the day at which it begins.
    first_minute: u32,
    /// Its length; over midnight it goes on into the next day.
    len_minutes: u32,
    text: String,
}

impl RuleWindow {
    /// Reads a window such as `mon-fri 08:00-18:00`, `sat,sun 22:00-06:00` or `08:00-18:00`.
    pub fn parse(text: &str) -> Option<Self> {
        let (days, hours) = match text.split_once(' ') {
            Some((days, hours)) => (parse_days(days)?, hours),
            None => ([true; 7], text),
        };
        let (first, last) = hours.split_once('-')?;
        let (first_minute, last_minute) = (parse_minute(first)?, parse_minute(last)?);
        let len_minutes = match last_minute.checked_sub(first_minute) {
            Some(len) => len,
            None => last_minute + DAY_MINUTES - first_minute,
        };
        let fits = first_minute < DAY_MINUTES && len_minutes > 0;
        fits.then(|| Self { days, first_minute, len_minutes, text: text.to_owned() })
    }

    /// Whether a time is in the window.
    pub fn has(&self, time: SystemTime) -> bool {
        let minutes = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / 60;
        let minute = (minutes + FIRST_DAY * u64::from(DAY_MINUTES)) % u64::from(WEEK_MINUTES);
        let minute = u32::try_from(minute).unwrap_or(0);
        (0..7u32).zip(self.days).any(|(day, begins)| {
            let begin = day * DAY_MINUTES + self.first_minute;
            begins && (minute + WEEK_MINUTES - begin) % WEEK_MINUTES < self.len_minutes
        })
    }

    /// The window as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }
}

fn parse_days(text: &str) -> Option<[bool; 7]> {
    let mut days = [false; 7];
    let number = |name: &str| DAYS.iter().position(|day| *day == name);
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (mut day, last) = (number(first)?, number(last)?);
        loop {
            // A day that is named twice is surely a mistake.
            if std::mem::replace(&mut days[day], true) {
                return None;
            }
            if day == last {
                break;
            }
            day = (day + 1) % 7;
        }
    }
    Some(days)
}

/// The minute of the day of a time `HH:MM`, up to `24:00`.
fn parse_minute(text: &str) -> Option<u32> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |text: &str| -> Option<u32> {
        let is_two_digits = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| is_two_digits)
    };
    let (hours, minutes) = (number(hours)?, number(minutes)?);
    (minutes < 60 && hours * 60 + minutes <= DAY_MINUTES).then_some(hours * 60 + minutes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A time in the week of Monday, 2026-01-05.
    fn at(day: u64, hour: u64, minute: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_767_571_200 + ((day * 24 + hour) * 60 + minute) * 60)
    }

    #[test]
    fn a_window_has_its_hours_on_its_days() {
        let has = |text: &str, time| RuleWindow::parse(text).unwrap().has(time);
        for (text, inside, outside) in [
            ("mon-fri 08:00-18:00", at(0, 8, 0), at(0, 7, 59)),
            ("mon-fri 08:00-18:00", at(4, 17, 59), at(4, 18, 0)),
            ("mon-fri 08:00-18:00", at(2, 12, 0), at(5, 12, 0)),
            ("08:00-18:00", at(6, 12, 0), at(6, 20, 0)),
            ("22:00-06:00", at(3, 23, 0), at(3, 6, 0)),
            ("22:00-06:00", at(3, 5, 59), at(3, 21, 59)),
            ("sun 22:00-06:00", at(7, 5, 59), at(6, 5, 59)),
            ("sat-mon 00:00-24:00", at(7, 23, 59), at(8, 0, 0)),
            ("tue,thu 10:00-10:01", at(3, 10, 0), at(2, 10, 0)),
        ] {
            assert!(has(text, inside), "{text}");
            assert!(!has(text, outside), "{text}");
        }
    }

    #[test]
    fn a_text_that_is_no_window_is_refused() {
        for text in [
            "",
            "mon",
            "08:00",
            "08:00-08:00",
            "8:00-18:00",
            "08:00-24:01",
            "24:00-06:00",
            "08:60-18:00",
            "mon-fri  08:00-18:00",
            "Mon 08:00-18:00",
            "monday 08:00-18:00",
            "mon,mon 08:00-18:00",
            "mon- 08:00-18:00",
            "08:00-18:00 mon",
            "+8:00-18:00",
        ] {
            assert_eq!(RuleWindow::parse(text), None, "{text:?}");
        }
    }
}
