# Roman numerals.
module Roman
  LETTERS = { 1000 => 'M', 500 => 'D', 100 => 'C', 50 => 'L', 10 => 'X', 5 => 'V', 1 => 'I' }.freeze

  def self.to_s(number)
    raise ArgumentError, "#{number} has no numeral" unless (1..3999).cover?(number)

    LETTERS.map do |value, letter|
      count, number = number.divmod(value)
      letter * count
    end.join
  end
end
