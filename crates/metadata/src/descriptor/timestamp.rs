//! The informational `timestamp` of a descriptor.

use std::time::{SystemTime, UNIX_EPOCH};

/// `YYYY-MM-DD HH:MM:SS.uuuuuu`, the form of the wire.
///
/// In UTC, where C++ writers use local time: nobody computes with it, and UTC can be compared
/// between hosts. Times before 1970 read as 1970.
pub fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    let second_of_day = seconds % 86_400;
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{:06}",
        second_of_day / 3_600,
        second_of_day / 60 % 60,
        second_of_day % 60,
        since.subsec_micros()
    )
}

/// Gregorian date of a day counted from 1970-01-01. Years start in March here, so that the leap
/// day is the last day of its year and the months' lengths follow one formula.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn leap_days_and_microseconds_are_written_as_on_the_wire() {
        let at = |seconds, micros| {
            timestamp(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros))
        };
        assert_eq!(at(0, 0), "1970-01-01 00:00:00.000000");
        assert_eq!(at(951_782_400, 0), "2000-02-29 00:00:00.000000");
        assert_eq!(at(1_709_251_199, 345), "2024-02-29 23:59:59.000345");
        assert_eq!(at(1_787_393_472, 1), "2026-08-22 10:11:12.000001");
    }
}
