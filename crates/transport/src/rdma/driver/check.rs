//! What time does: endpoints without progress, and transfers whose time is over.

use std::time::Duration;

use super::super::endpoint::CloseCause;
use super::super::inbox::Report;
use super::Driver;
use crate::machine::Time;

/// How often progress and time limits are looked at.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// How often places of rails are looked for that nobody uses any more.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// How long a rail has to have had work before its rate is told.
const SAMPLE: Duration = Duration::from_millis(20);

/// A thread that was not scheduled for longer than this shifts all its deadlines by the gap.
const GAP: Duration = Duration::from_millis(200);

/// In-flight bytes that a NIC is always granted: less could not keep a card busy until its rate is
/// measured.
const WINDOW_BYTES_MIN: u64 = 512 << 10;

/// How much longer than that, at the measured rate, in-flight bytes may take. What waits longer in
/// a device's queues helps nobody: it runs into the acknowledgement time-out of the queue pairs
/// (67 ms), and has to be posted again when its rail fails.
const WINDOW_TIME: Duration = Duration::from_millis(20);

/// Rate that is assumed before any is measured, in bytes a second.
pub(super) const RATE_ASSUMED: f64 = 4e6;

/// Longest time that in-flight bytes are granted, whatever the rate.
const GRANT_MAX: Duration = Duration::from_secs(5);

/// The measured rate of a NIC, and when things were last looked at.
pub(super) struct Pace {
    last_step: Time,
    next_check: Time,
    next_sweep: Time,
    last_check: Time,
    /// Since the last check.
    pub(super) completed_bytes: u64,
    /// Whether the last poll emptied the completion queue.
    pub(super) queue_empty: bool,
    was_busy: bool,
    /// Bytes a second, while there was always work in flight.
    pub(super) rate: Option<f64>,
}

impl Pace {
    pub(super) fn new(now: Time) -> Self {
        Self {
            last_step: now,
            next_check: now,
            next_sweep: now,
            last_check: now,
            completed_bytes: 0,
            queue_empty: true,
            was_busy: false,
            rate: None,
        }
    }

    /// How long nothing may complete with `bytes` in flight: the setting, and four times as long
    /// as the bytes take at the measured rate.
    fn allowance(&self, progress_timeout: Duration, bytes: u64) -> Duration {
        let rate = self.rate.unwrap_or(RATE_ASSUMED).max(1.0);
        let grant = Duration::try_from_secs_f64(4.0 * bytes as f64 / rate).unwrap_or(GRANT_MAX);
        progress_timeout + grant.min(GRANT_MAX)
    }

    /// Bytes that a NIC may have in flight over all its links.
    pub(super) fn window_bytes(&self) -> u64 {
        let rate = self.rate.unwrap_or(0.0);
        WINDOW_BYTES_MIN.max((rate * WINDOW_TIME.as_secs_f64()) as u64)
    }

    fn measure(&mut self, now: Time, busy: bool) {
        let took = now.saturating_since(self.last_check).as_secs_f64();
        if self.was_busy && busy && took > 0.0 && self.completed_bytes > 0 {
            let rate = self.completed_bytes as f64 / took;
            self.rate = Some(self.rate.map_or(rate, |old| old + (rate - old) / 8.0));
        }
        self.was_busy = busy;
        self.completed_bytes = 0;
        self.last_check = now;
    }
}

impl Driver {
    pub(super) fn check(&mut self, now: Time) {
        let gap = now.saturating_since(self.pace.last_step);
        self.pace.last_step = now;
        let was_away = gap > GAP;
        if was_away {
            self.shift(gap);
        }
        if now < self.pace.next_check {
            return;
        }
        self.pace.next_check = now + CHECK_EVERY;
        // With completions left in the queue, silence proves nothing.
        if self.pace.queue_empty && !was_away {
            self.pace.measure(now, !self.flights.is_empty());
            self.check_progress(now);
        }
        self.check_time_limits(now);
        if self.openings.count() > 1 || self.nic.opening().is_none() {
            let links = self.links.iter().map(|(_, link)| link.opening);
            self.openings.retain_from(links.min());
        }
        self.measure_rails(now);
        if now >= self.pace.next_sweep {
            self.pace.next_sweep = now + SWEEP_EVERY;
            self.sweep_lanes();
        }
    }

    fn measure_rails(&mut self, now: Time) {
        // A rate can wait until the control side has caught up.
        if !self.unsent.is_empty() {
            return;
        }
        for lane in &mut self.lanes {
            if let Some((bytes, took)) = lane.sample(SAMPLE, now) {
                let rail = lane.rail.id();
                self.unsent
                    .push_back(Report::Progress { rail, bytes, took });
            }
        }
    }

    /// Frees the places of rails whose peers are gone.
    fn sweep_lanes(&mut self) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            if !lane.is_free && lane.is_abandoned() {
                lane.is_free = true;
                self.free_lanes.push_back(index);
            }
        }
    }

    /// Our own thread did not run: the peer is not to blame for the time.
    fn shift(&mut self, gap: Duration) {
        for key in self.link_keys.values() {
            if let Some(link) = self.links.get_mut(*key) {
                for queue in &mut link.queues {
                    queue.progress_at += gap;
                }
            }
        }
    }

    fn check_progress(&mut self, now: Time) {
        let allowance = self
            .pace
            .allowance(self.progress_timeout, self.in_flight_bytes);
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        for key in self.link_keys.values() {
            let since = self
                .links
                .get_mut(*key)
                .and_then(|link| link.stalled_since());
            if since.is_some_and(|since| now > since + allowance) {
                keys.push(*key);
            }
        }
        for key in &keys {
            self.break_link_for(*key, CloseCause::Stalled(allowance));
        }
        self.keys = keys;
    }

    fn check_time_limits(&mut self, now: Time) {
        for lane in &mut self.lanes {
            lane.pending.retain(|work| {
                let over = work.transfer.check_cut_off(now);
                if over {
                    work.take_off();
                }
                !over
            });
        }
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        keys.extend(self.flights.iter().filter_map(|(_, flight)| {
            let transfer = flight.transfer()?;
            let over = now >= transfer.spec().cut_off;
            (over && transfer.check_cut_off(now)).then_some(flight.link)
        }));
        for key in &keys {
            self.break_link_for(*key, CloseCause::CutOff);
        }
        self.keys = keys;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allowance_follows_the_measured_rate() {
        let mut pace = Pace::new(Time::ZERO);
        let base = Duration::from_millis(500);
        assert_eq!(pace.allowance(base, 0), base);
        assert_eq!(pace.allowance(base, 1 << 40), base + GRANT_MAX);
        pace.measure(Time::from_millis(1), true);
        pace.completed_bytes = 1_000_000;
        pace.measure(Time::from_millis(1_001), true);
        assert_eq!(pace.window_bytes(), WINDOW_BYTES_MIN);
        assert_eq!(
            pace.allowance(base, 1_000_000),
            base + Duration::from_secs(4)
        );
    }
}
