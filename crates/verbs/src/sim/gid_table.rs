//! A port's GID table.

use std::collections::BTreeMap;

use crate::{Gid, GidEntry, GidType, Netdev};

/// Rows by index, as the kernel's `ib_core` cache keeps them.
///
/// A new row takes the first free index. A row whose address is deleted disappears for readers at
/// once, but its index stays taken while a queue pair refers to it; then an unrelated address can
/// take it, below rows that are in use (measured on soft-RoCE).
#[derive(Debug)]
pub(super) struct GidTable {
    rows: BTreeMap<u32, Row>,
    length: u32,
}

#[derive(Debug)]
struct Row {
    gid: Gid,
    gid_type: GidType,
    netdev: Option<Netdev>,
    /// Queue pairs between RTR and RESET or destruction.
    users: u32,
    /// False for a hole that users hold.
    live: bool,
}

impl GidTable {
    pub(super) fn new(length: u32) -> Self {
        Self {
            rows: BTreeMap::new(),
            length,
        }
    }

    pub(super) fn length(&self) -> u32 {
        self.length
    }

    /// Adds a row at the first free index; `None` when the table is full.
    pub(super) fn add(
        &mut self,
        gid: Gid,
        gid_type: GidType,
        netdev: Option<Netdev>,
    ) -> Option<u32> {
        let index = (0..self.length).find(|index| !self.rows.contains_key(index))?;
        self.rows.insert(
            index,
            Row {
                gid,
                gid_type,
                netdev,
                users: 0,
                live: true,
            },
        );
        Some(index)
    }

    /// Deletes the rows that `unwanted` accepts, and returns their indexes.
    pub(super) fn delete(&mut self, unwanted: impl Fn(&Gid, Option<&Netdev>) -> bool) -> Vec<u32> {
        let mut deleted = Vec::new();
        self.rows.retain(|index, row| {
            if !row.live || !unwanted(&row.gid, row.netdev.as_ref()) {
                return true;
            }
            deleted.push(*index);
            row.live = false;
            row.users > 0
        });
        deleted
    }

    /// The address at `index`, if there is a live row.
    pub(super) fn gid(&self, index: u32) -> Option<Gid> {
        self.rows
            .get(&index)
            .filter(|row| row.live)
            .map(|row| row.gid)
    }

    /// True while a live row has that address.
    pub(super) fn contains(&self, gid: &Gid) -> bool {
        self.rows.values().any(|row| row.live && row.gid == *gid)
    }

    /// Enters a user of a live row.
    pub(super) fn acquire(&mut self, index: u32) -> Option<Gid> {
        let row = self.rows.get_mut(&index).filter(|row| row.live)?;
        row.users += 1;
        Some(row.gid)
    }

    /// Takes a user away. A hole without users becomes a free index.
    pub(super) fn release(&mut self, index: u32) {
        if let Some(row) = self.rows.get_mut(&index) {
            row.users = row.users.saturating_sub(1);
            if row.users == 0 && !row.live {
                self.rows.remove(&index);
            }
        }
    }

    /// The addresses of live rows.
    pub(super) fn gids(&self) -> impl Iterator<Item = Gid> {
        self.rows.values().filter(|row| row.live).map(|row| row.gid)
    }

    /// The live rows, by index.
    pub(super) fn entries(&self) -> Vec<GidEntry> {
        self.rows
            .iter()
            .filter(|(_, row)| row.live)
            .map(|(index, row)| GidEntry {
                index: *index,
                gid: row.gid,
                gid_type: row.gid_type,
                netdev: row.netdev.clone(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(last: u8) -> Gid {
        Gid::from_ipv4([10, 0, 0, last].into())
    }

    fn add(table: &mut GidTable, last: u8) -> Option<u32> {
        table.add(gid(last), GidType::RoceV2, None)
    }

    #[test]
    fn a_hole_stays_while_a_queue_pair_refers_to_the_row() {
        let mut table = GidTable::new(8);
        for last in 1..=3 {
            add(&mut table, last);
        }
        assert_eq!(table.acquire(1), Some(gid(2)));
        assert_eq!(table.delete(|row, _| *row == gid(2)), [1]);
        assert_eq!(table.gid(1), None);
        assert_eq!(table.gid(2), Some(gid(3)), "later rows keep their index");
        assert_eq!(add(&mut table, 2), Some(3), "the same bytes, elsewhere");
        table.release(1);
        assert_eq!(add(&mut table, 9), Some(1), "an unrelated address, below");
    }

    #[test]
    fn an_unused_row_comes_back_at_its_old_index() {
        let mut table = GidTable::new(2);
        add(&mut table, 1);
        add(&mut table, 2);
        assert_eq!(add(&mut table, 3), None, "the table is full");
        table.delete(|row, _| *row == gid(1));
        assert_eq!(add(&mut table, 1), Some(0));
        assert_eq!(table.entries().len(), 2);
    }
}
