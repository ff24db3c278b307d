//! Rotary position embedding: pairs of a head's elements turn by position times frequency.

use crate::weights::RopeLayout;

/// Frequencies of a model and how its heads are paired.
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    layout: RopeLayout,
}

impl Rope {
    pub fn new(head_dim: usize, theta: f64, layout: RopeLayout) -> Self {
        // f32 as in the reference: an angle is f32 position times f32 frequency.
        let frequencies = (0..head_dim / 2)
            .map(|i| (1.0 / theta.powf(2.0 * i as f64 / head_dim as f64)) as f32)
            .collect();
        Rope {
            frequencies,
            layout,
        }
    }

    /// Elements of a table row: cosines, then sines.
    pub fn table_len(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Fills the table row of a position.
    pub fn fill(&self, position: usize, table: &mut [f32]) {
        let (cos, sin) = table.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = f64::from(position as f32 * frequency);
            *cos = angle.cos() as f32;
            *sin = angle.sin() as f32;
        }
    }

    /// Turns one head by a table row.
    pub fn turn(&self, head: &mut [f32], table: &[f32]) {
        let half = self.frequencies.len();
        let (cos, sin) = table.split_at(half);
        match self.layout {
            RopeLayout::Halves => {
                let (low, high) = head.split_at_mut(half);
                for (i, (a, b)) in low.iter_mut().zip(high).enumerate() {
                    let (x, y) = (*a, *b);
                    *a = x * cos[i] - y * sin[i];
                    *b = y * cos[i] + x * sin[i];
                }
            }
            RopeLayout::Interleaved => {
                for (i, pair) in head.chunks_exact_mut(2).enumerate() {
                    let (x, y) = (pair[0], pair[1]);
                    pair[0] = x * cos[i] - y * sin[i];
                    pair[1] = y * cos[i] + x * sin[i];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_turn_the_same_pairs() {
        let halves = Rope::new(8, 100.0, RopeLayout::Halves);
        let interleaved = Rope::new(8, 100.0, RopeLayout::Interleaved);
        let mut table = [0.0; 8];
        halves.fill(7, &mut table);
        let mut a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let mut b = [1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0];
        halves.turn(&mut a, &table);
        interleaved.turn(&mut b, &table);
        assert_eq!(a[0], 7f32.cos() - 5.0 * 7f32.sin());
        for i in 0..4 {
            assert_eq!((a[i], a[i + 4]), (b[2 * i], b[2 * i + 1]));
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let rope = Rope::new(4, 1e4, RopeLayout::Halves);
        let mut table = [0.0; 4];
        rope.fill(0, &mut table);
        let mut head = [1.0, -2.0, 3.0, 0.5];
        rope.turn(&mut head, &table);
        assert_eq!(head, [1.0, -2.0, 3.0, 0.5]);
    }
}
