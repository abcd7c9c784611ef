"""Half-open intervals: (begin, end) covers begin, but not end."""


def merge(intervals):
    merged = []
    for begin, end in intervals:
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def covers(intervals, number):
    return any(begin <= number < end for begin, end in intervals)
