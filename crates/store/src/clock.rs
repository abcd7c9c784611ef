//! The time of an event: RFC 3339 in UTC with microseconds, formatted by hand.
//!
//! Absent on purpose: correction of a clock that was set back. `seq` orders events; `at` is only the clock's
//! time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_SECS: i64 = 86_400;
/// 9999-12-31T23:59:59: RFC 3339 has no later years.
const LAST_SECS: i64 = 253_402_300_799;
/// 0000-01-01T00:00:00.
const FIRST_SECS: i64 = -62_167_219_200;

/// The current time in the format of events.
pub fn now() -> String {
    rfc3339(SystemTime::now())
}

/// A time in the format of events. A time that RFC 3339 cannot express becomes the nearest one that it can.
pub fn rfc3339(time: SystemTime) -> String {
    let (secs, micros) = since_epoch(time);
    let (year, month, day) = civil(secs.div_euclid(DAY_SECS));
    let left = secs.rem_euclid(DAY_SECS);
    let (hour, minute, second) = (left / 3600, left / 60 % 60, left % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Whole seconds since 1970, rounded down, and the microseconds after them.
fn since_epoch(time: SystemTime) -> (i64, u32) {
    let (secs, micros) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (whole(after), after.subsec_micros()),
        Err(before) => {
            let before = before.duration();
            let micros = before.subsec_nanos().div_ceil(1000);
            if micros == 0 { (-whole(before), 0) } else { (-whole(before) - 1, 1_000_000 - micros) }
        }
    };
    if secs > LAST_SECS {
        (LAST_SECS, 999_999)
    } else if secs < FIRST_SECS {
        (FIRST_SECS, 0)
    } else {
        (secs, micros)
    }
}

/// Limits a duration to a value far beyond every year that can be formatted, and far from overflow.
fn whole(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX / 2).min(i64::MAX / 2)
}

/// Year, month and day of a day counted from 1970-01-01: Howard Hinnant's `civil_from_days`.
///
/// Years begin in March there, so that the leap day is the last day of a year; eras are 400 years.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_are_spelled_as_everybody_spells_them() {
        let at = |secs: i64, nanos: u32| {
            let whole = Duration::from_secs(secs.unsigned_abs());
            let base = if secs < 0 { UNIX_EPOCH - whole } else { UNIX_EPOCH + whole };
            rfc3339(base + Duration::from_nanos(u64::from(nanos)))
        };
        for (secs, nanos, text) in [
            (0, 0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, 999_999_999, "2000-02-28T23:59:59.999999Z"),
            (951_782_400, 1_000, "2000-02-29T00:00:00.000001Z"),
            (1_000_000_000, 0, "2001-09-09T01:46:40.000000Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000000Z"),
            (LAST_SECS, 0, "9999-12-31T23:59:59.000000Z"),
            (LAST_SECS + 1, 0, "9999-12-31T23:59:59.999999Z"),
            (-1, 0, "1969-12-31T23:59:59.000000Z"),
            (-1, 999_999_999, "1969-12-31T23:59:59.999999Z"),
            (FIRST_SECS, 0, "0000-01-01T00:00:00.000000Z"),
            (FIRST_SECS - 1, 0, "0000-01-01T00:00:00.000000Z"),
        ] {
            assert_eq!(at(secs, nanos), text, "{secs} s {nanos} ns");
        }
    }

    #[test]
    fn every_day_of_800_years_follows_the_day_before() {
        let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let (mut year, mut month, mut day) = (1600, 1, 1);
        for days in -135_140..157_054 {
            assert_eq!(civil(days), (year, month, day));
            let last = match month {
                2 => 28 + i64::from(leap(year)),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > last {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
        assert_eq!((year, month, day), (2400, 1, 1));
    }
}
