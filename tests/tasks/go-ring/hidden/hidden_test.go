package ring

import (
	"fmt"
	"testing"
)

func filled(size, count int) *Ring[int] {
	r := New[int](size)
	for value := 1; value <= count; value++ {
		r.Push(value)
	}
	return r
}

func expect(t *testing.T, r *Ring[int], expected string) {
	t.Helper()
	if found := fmt.Sprint(r.Values()); found != expected {
		t.Errorf("expected %s, found %s", expected, found)
	}
}

func TestValues(t *testing.T) {
	expect(t, filled(3, 0), "[]")
	expect(t, filled(3, 2), "[1 2]")
	expect(t, filled(3, 3), "[1 2 3]")
	expect(t, filled(3, 5), "[3 4 5]")
	expect(t, filled(1, 4), "[4]")
}

func TestResize(t *testing.T) {
	for _, c := range []struct {
		size, count, to int
		expected        string
	}{{3, 5, 2, "[5 9]"}, {3, 5, 5, "[3 4 5 9]"}, {4, 2, 2, "[2 9]"}, {4, 4, 4, "[2 3 4 9]"}, {3, 3, 1, "[9]"}} {
		r := filled(c.size, c.count)
		r.Resize(c.to)
		r.Push(9)
		expect(t, r, c.expected)
	}
}
