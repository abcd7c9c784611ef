package limiter

import (
	"testing"
	"time"
)

func run(b *Bucket, step time.Duration, calls int, start time.Time) int {
	now, allowed := start, 0
	b.Now = func() time.Time { return now }
	for i := 0; i < calls; i++ {
		if b.Allow() {
			allowed++
		}
		now = now.Add(step)
	}
	return allowed
}

var begin = time.Unix(1_000_000, 0)

func TestBurst(t *testing.T) {
	if found := run(New(1, 3), 0, 10, begin); found != 3 {
		t.Errorf("a full bucket of 3 allowed %d", found)
	}
}

func TestPartsOfASecond(t *testing.T) {
	if found := run(New(2, 1), 100*time.Millisecond, 101, begin); found < 20 || found > 22 {
		t.Errorf("10 seconds at 2 per second allowed %d", found)
	}
}

func TestLongPause(t *testing.T) {
	b := New(5, 4)
	run(b, 0, 4, begin)
	if found := run(b, 0, 100, begin.Add(time.Hour)); found != 4 {
		t.Errorf("after an hour a burst of 4 allowed %d", found)
	}
}
